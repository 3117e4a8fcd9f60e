package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// lineWidth is how wide a line may be.
const lineWidth = 98

// barWidth is how wide the longest bar of a chart is.
const barWidth = 48

// commandWidth is how wide the first of two columns is, if it has things to type.
const commandWidth = 28

// ANSI styles.
const (
	bold  = "1"
	green = "32"
	cyan  = "36"
)

// printer prints for people, in colours if they look at a terminal.
type printer struct {
	w        io.Writer
	coloured bool
	gapped   bool  // the last line is empty
	broken   error // of the first line that could not be printed
}

func newPrinter(f *os.File) *printer {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	terminal := err == nil && os.Getenv("TERM") != "dumb"

	return &printer{w: f, coloured: terminal && os.Getenv("NO_COLOR") == ""}
}

func (p *printer) line(format string, args ...any) {
	if _, err := fmt.Fprintf(p.w, format+"\n", args...); err != nil && p.broken == nil {
		p.broken = err
	}
	p.gapped = false
}

// gap sets apart what follows.
func (p *printer) gap() {
	if !p.gapped {
		p.line("")
		p.gapped = true
	}
}

func (p *printer) styled(style, text string) string {
	if !p.coloured {
		return text
	}

	return "\x1b[" + style + "m" + text + "\x1b[0m"
}

func (p *printer) heading(text string) {
	p.gap()
	p.line("%s", p.styled(bold, text))
}

// story prints what is about to happen.
func (p *printer) story(text string) {
	for _, line := range wrap(text, lineWidth-3) {
		p.line("   %s", line)
	}
	p.gap()
}

// seen prints what was observed.
func (p *printer) seen(format string, args ...any) {
	mark := p.styled(green, "✓")
	for _, line := range wrap(fmt.Sprintf(format, args...), lineWidth-5) {
		p.line("   %s %s", mark, line)
		mark = " "
	}
}

// bar is a line of a chart.
type bar struct {
	label string
	value int
}

func (p *printer) chart(bars []bar) {
	longest := slices.MaxFunc(bars, func(a, b bar) int { return a.value - b.value }).value
	for _, b := range bars {
		width := (b.value*barWidth + longest/2) / max(longest, 1)
		p.line("   %s  %s %d", b.label, p.styled(cyan, strings.Repeat("▇", width)), b.value)
	}
	p.gap()
}

// command shows what a person would type to do the same.
func (p *printer) command(format string, args ...any) {
	p.line("   %s", p.styled(bold, "$ "+fmt.Sprintf(format, args...)))
}

// printed shows what a command has printed.
func (p *printer) printed(text string) {
	for line := range strings.Lines(text) {
		p.line("   %s", strings.TrimRight(line, " \n"))
	}
	p.gap()
}

// rows prints commands to type, each with its purpose.
func (p *printer) rows(rows [][2]string) {
	for _, row := range rows {
		command, purpose := row[0], row[1]
		if len(command) > commandWidth && purpose != "" {
			p.line("   %s", command)
			command = ""
		}
		p.line("%s", strings.TrimRight(fmt.Sprintf("   %-*s  %s", commandWidth, command, purpose), " "))
	}
}

// wrap breaks a text into lines. One that fits keeps its blanks.
func wrap(text string, width int) []string {
	if utf8.RuneCountInString(text) <= width {
		return []string{text}
	}
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			lines = append(lines, line)
			line = word
		default:
			line += " " + word
		}
	}

	return append(lines, line)
}

// short formats a duration with few digits.
func short(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	default:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
}
