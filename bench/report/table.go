package report

import (
	"bufio"
	"io"
	"strings"
	"unicode/utf8"
)

// table is something in rows and columns, with what is to be said of it.
type table struct {
	title  string
	header []string
	rows   []row
	notes  []string
}

// row is a cell for each column, or a heading of the rows below it.
type row struct {
	heading string
	cells   []cell
}

// cell is what is written in lines below each other.
type cell []string

// writeText writes columns as wide as they must be.
func (t table) writeText(w *bufio.Writer) {
	write(w, t.title, "\n")
	if len(t.rows) > 0 {
		widths := t.widths()
		writeLine(w, widths, t.header)
		write(w, "  ", strings.Repeat("─", sum(widths)+2*(len(widths)-1)), "\n")
		for _, row := range t.rows {
			if row.cells == nil {
				write(w, "  ", row.heading, "\n")

				continue
			}
			for i := range row.height() {
				writeLine(w, widths, row.line(i))
			}
		}
	}
	for _, note := range t.notes {
		write(w, "  ", note, "\n")
	}
	write(w, "\n")
}

// writeLine writes one line of a row, without blanks at its end.
func writeLine(w *bufio.Writer, widths []int, line []string) {
	var text strings.Builder
	for i, word := range line {
		text.WriteString("  " + word + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(word)))
	}
	write(w, strings.TrimRight(text.String(), " "), "\n")
}

// widths returns how wide each column is.
func (t table) widths() []int {
	widths := make([]int, len(t.header))
	for i, word := range t.header {
		widths[i] = utf8.RuneCountInString(word)
	}
	for _, row := range t.rows {
		for i, cell := range row.cells {
			for _, word := range cell {
				widths[i] = max(widths[i], utf8.RuneCountInString(word))
			}
		}
	}

	return widths
}

// height returns how many lines a row has.
func (r row) height() int {
	var height int
	for _, cell := range r.cells {
		height = max(height, len(cell))
	}

	return height
}

// line returns line i of each cell.
func (r row) line(i int) []string {
	words := make([]string, len(r.cells))
	for column, cell := range r.cells {
		if i < len(cell) {
			words[column] = cell[i]
		}
	}

	return words
}

// writeMarkdown writes the same for a document, below a heading.
func (t table) writeMarkdown(w *bufio.Writer, level string) {
	write(w, level, " ", t.title, "\n\n")
	if len(t.rows) > 0 {
		write(w, "| ", strings.Join(t.header, " | "), " |\n")
		write(w, strings.Repeat("|---", len(t.header)), "|\n")
		for _, row := range t.rows {
			if row.cells == nil {
				write(w, "| *", escapeMarkdown(row.heading), "*", strings.Repeat(" |", len(t.header)), "\n")

				continue
			}
			for _, cell := range row.cells {
				write(w, "| ", escapeMarkdown(strings.Join(cell, "<br>")), " ")
			}
			write(w, "|\n")
		}
		write(w, "\n")
	}
	for _, note := range t.notes {
		write(w, "- ", escapeMarkdown(note), "\n")
	}
	if len(t.notes) > 0 {
		write(w, "\n")
	}
}

// escapeMarkdown makes text stay in its cell.
func escapeMarkdown(text string) string {
	return strings.NewReplacer("|", `\|`, "\n", " ", "*", `\*`).Replace(text)
}

// write writes words. An error comes out at the end, with Flush.
func write(w io.StringWriter, words ...string) {
	for _, word := range words {
		_, _ = w.WriteString(word)
	}
}

func sum(widths []int) int {
	var sum int
	for _, width := range widths {
		sum += width
	}

	return sum
}
