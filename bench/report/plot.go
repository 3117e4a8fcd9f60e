package report

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Sizes of a plot, with the legend at its right.
const (
	plotWidth   = 22 * vg.Centimeter
	plotHeight  = 11.5 * vg.Centimeter
	legendWidth = 5.4 * vg.Centimeter
	margin      = 0.35 * vg.Centimeter
	plotDPI     = 120
)

// WritePlots writes a plot of all that there are values for to a folder, which it
// makes, each as SVG and as PNG. It returns the names of the files.
func (r *Run) WritePlots(folder string) ([]string, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, fmt.Errorf("folder of the plots: %w", err)
	}
	var names []string
	v := r.view()
	for _, c := range charts {
		lines := v.series(c)
		if lines == nil {
			continue
		}
		vector := vgsvg.New(plotWidth, plotHeight)
		image := vgimg.NewWith(vgimg.UseWH(plotWidth, plotHeight), vgimg.UseDPI(plotDPI))
		for suffix, canvas := range map[string]interface {
			vg.CanvasSizer
			io.WriterTo
		}{".svg": vector, ".png": vgimg.PngCanvas{Canvas: image}} {
			name := filepath.Join(folder, c.file+suffix)
			if err := errors.Join(c.draw(lines, draw.New(canvas)), writeFile(name, canvas)); err != nil {
				return names, fmt.Errorf("plot %s: %w", name, err)
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)

	return names, nil
}

// writeFile writes a plot. In an SVG, it names typefaces for those who do not have
// ours.
func writeFile(name string, from io.WriterTo) error {
	var out bytes.Buffer
	if _, err := from.WriteTo(&out); err != nil {
		return err
	}
	content := out.Bytes()
	if strings.HasSuffix(name, ".svg") {
		content = bytes.ReplaceAll(content, []byte("font-family:Liberation Sans;"), []byte("font-family:'Liberation Sans',Arial,sans-serif;"))
	}

	return os.WriteFile(name, content, 0o644)
}

// draw draws lines, axes, legend and words. Gonum would leave half of the canvas
// empty for the title of a logarithmic axis, so all titles are drawn here.
func (c chart) draw(lines []series, canvas draw.Canvas) error {
	p := plot.New()
	legend := plot.NewLegend()
	setText(p, &legend)
	wide := c.setAxes(p, lines)
	for i, line := range lines {
		if err := line.draw(p, &legend, i, len(lines)); err != nil {
			return err
		}
	}
	p.Draw(draw.Crop(canvas, margin, -legendWidth, 0.9*vg.Centimeter, -1.7*vg.Centimeter))
	right := plotWidth - legendWidth + margin
	legend.Draw(draw.Crop(canvas, right, 0, 0, -1.7*vg.Centimeter))

	y := c.y
	if wide {
		y += ", logarithmic"
	}
	canvas.FillText(textStyle(13), vg.Point{X: margin, Y: plotHeight - 0.7*vg.Centimeter}, c.title)
	canvas.FillText(textStyle(10), vg.Point{X: margin, Y: plotHeight - 1.3*vg.Centimeter}, "↑ "+y)
	canvas.FillText(textStyle(10), vg.Point{X: plotWidth/2 - legendWidth, Y: margin}, "Services in the cluster, logarithmic →")
	notes := append(slices.Clone(c.notes), roundsNote(lines)...)
	for i, note := range notes {
		up := vg.Length(len(notes)-i-1) * 0.45 * vg.Centimeter
		canvas.FillText(textStyle(9), vg.Point{X: right, Y: margin + up}, note)
	}

	return nil
}

// roundsNote says what points and bars are.
func roundsNote(lines []series) []string {
	var rounds int
	for _, line := range lines {
		for _, y := range line.y {
			rounds = max(rounds, y.Rounds)
		}
	}
	if rounds == 1 {
		return []string{"Measured once."}
	}

	return []string{fmt.Sprintf("Medians of %d rounds,", rounds), "bars: their quartiles."}
}

// setText makes the words of gonum readable.
func setText(p *plot.Plot, legend *plot.Legend) {
	p.X.Tick.Label.Font = font.From(sans, 10)
	p.Y.Tick.Label.Font = font.From(sans, 10)
	legend.TextStyle.Font = font.From(sans, 10)
	legend.Top, legend.Left = true, true
	legend.Padding = vg.Points(5)
	legend.ThumbnailWidth = vg.Points(28)
}

// setAxes makes the axes as long as the values need, with the grid behind them.
// It says whether the values are so far apart that the axis is logarithmic.
func (c chart) setAxes(p *plot.Plot, lines []series) bool {
	var services []float64
	low, high := math.Inf(1), 0.0
	for _, line := range lines {
		services = append(services, line.x...)
		for _, y := range line.y {
			low, high = min(low, y.Low), max(high, y.High)
		}
	}
	slices.Sort(services)
	services = slices.Compact(services)
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, constantTicks(services)
	p.X.Min, p.X.Max = services[0]/1.6, services[len(services)-1]*1.6
	p.X.Padding, p.Y.Padding = 0, 0
	wide := c.against == absolute && low > 0 && high/low > 6
	if wide {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, decadeTicks{}
		p.Y.Min, p.Y.Max = low/1.4, high*1.4
	} else {
		p.Y.Tick.Marker = linearTicks{}
		p.Y.Min, p.Y.Max = min(0, low*1.1), max(high*1.1, 1e-6)
	}
	grid := plotter.NewGrid()
	grid.Vertical, grid.Horizontal = gridStyle, gridStyle
	p.Add(grid)
	if c.against != absolute {
		p.Y.Max = max(p.Y.Max, 1.1)
		unity := plotter.NewFunction(func(float64) float64 { return 1 })
		unity.XMin, unity.XMax, unity.Samples, unity.LineStyle = p.X.Min, p.X.Max, 2, unityStyle
		p.Add(unity)
	}

	return wide
}

// points are what gonum wants to know of a series.
type points struct {
	plotter.XYs
	plotter.YErrors
}

// draw adds a line with its points and the quartiles of each. Lines are a little
// beside each other, so that no error bar hides another.
func (s series) draw(p *plot.Plot, legend *plot.Legend, place, count int) error {
	aside := math.Pow(1.03, float64(place)-float64(count-1)/2)
	var all points
	for i, y := range s.y {
		all.XYs = append(all.XYs, plotter.XY{X: s.x[i] * aside, Y: y.Median})
		all.YErrors = append(all.YErrors, struct{ Low, High float64 }{y.Median - y.Low, y.High - y.Median})
	}
	line, marks, err := plotter.NewLinePoints(all.XYs)
	if err != nil {
		return fmt.Errorf("line of %s: %w", s.title, err)
	}
	bars, err := plotter.NewYErrorBars(all)
	if err != nil {
		return fmt.Errorf("quartiles of %s: %w", s.title, err)
	}
	look := lookOf(s.side)
	line.LineStyle, marks.GlyphStyle = look.line(s.dashed), look.glyph(s.dashed)
	bars.LineStyle, bars.CapWidth = look.line(false), vg.Points(5)
	bars.LineStyle.Width = vg.Points(1)
	p.Add(line, bars, marks)
	legend.Add(s.title, line, marks)

	return nil
}
