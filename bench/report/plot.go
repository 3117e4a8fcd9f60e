package report

import (
	"bytes"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// chart is a plot of a metric of each side, by the number of Services.
type chart struct {
	file    string // without its suffix
	title   string
	y       string // title of the axis
	note    string // explains the legend
	name    string // of the case
	against bound  // ofRef, ofDirect or absolute
	curves  []curve
}

// curve is a line of each side. The first of a chart is solid, the second dashed.
type curve struct {
	path, metric string
	suffix       string // distinguishes it from the other in the legend
}

const (
	refNote   = "ref: a node without a proxy, endpoints dialled directly. "
	besideRef = "1: as a node without a proxy, endpoints dialled directly. "
	firstNote = "First, last: of all Services. "
)

func lastAndFirst(metric string) []curve {
	return []curve{{ServiceLast, metric, ", last"}, {ServiceFirst, metric, ", first"}}
}

var charts = []chart{
	{"connect-p50", "Latency of connect() to a ClusterIP", "median latency, µs", firstNote + refNote, Connect, absolute, lastAndFirst(P50)},
	{"connect-rate", "TCP connections per second through a ClusterIP", "rate ÷ rate of ref", firstNote + besideRef, Connect, ofRef, lastAndFirst(Rate)},
	{"connect-cpu", "CPU for each TCP connection through a ClusterIP", "busy time of all cores per connection, µs", firstNote + refNote, Connect, absolute, lastAndFirst(CPU)},
	{"no-service", "The cost of the proxy to connections that are no Service's (pod to pod)", "rate ÷ rate of ref", besideRef, Connect, ofRef, []curve{{Direct, Rate, ""}}},
	{"udp-new", "UDP through a ClusterIP, a new socket for each request", "rate ÷ rate of ref", firstNote + besideRef, UDPNew, ofRef, lastAndFirst(Rate)},
	{"nodeport-far", "TCP connections per second from outside, NodePort → pod on the other node", "rate ÷ rate of the pod dialled directly",
		"1: the same pod, dialled directly: one hop less. ", Connect, ofDirect, []curve{{NodePortFar, Rate, ""}}},
	{"change-quiet", "Endpoint replaced: until a client gets the new one; all else quiet", "time from the API write, ms", "", ChangeQuiet, absolute,
		[]curve{{"", WriteP50, ", p50"}, {"", WriteP99, ", p99"}}},
	{"change-churn", "Endpoint replaced: until a client gets the new one; many others change", "time from the API write, ms", "", ChangeChurn, absolute,
		[]curve{{"", WriteP50, ", p50"}, {"", WriteP99, ", p99"}}},
	{"updates-cpu", "CPU of the proxy and its children for 1,000 endpoint updates", "CPU time, s", "", Updates, absolute, []curve{{"", CPUThousand, ""}}},
	{"start", "Cold start: from the start of the process until all Services are programmed", "time, s", "", Start, absolute, []curve{{"", StartTime, ""}}},
	{"memory", "Memory of the proxy", "resident, MiB", "Peak: the largest value so far. ", Memory, absolute, []curve{{"", RSS, ""}, {"", PeakRSS, ", peak"}}},
	{"kernel-memory", "Memory of the proxy's tables in the kernel", "MiB", "", Memory, absolute, []curve{{"", KernelMemory, ""}}},
}

// line is a curve of one side: gonum's points with their quartiles.
type line struct {
	plotter.XYs
	plotter.YErrors
	side, title string
	dashed      bool
	rounds      int
}

// lines returns the curves that have values.
func (v *view) lines(c chart) []line {
	var all []line
	for _, side := range v.allSides() {
		for i, curve := range c.curves {
			l := line{side: side, title: side + curve.suffix, dashed: i > 0}
			path := curve.path
			if side == Ref { // has no Services
				if path, l.title = controlOf(path), Ref; i > 0 || c.against != absolute {
					continue
				}
			}
			for _, services := range v.services() {
				y := v.measure(goal{name: c.name, path: path, metric: curve.metric, against: c.against}, services, side)
				if y.Rounds > 0 { // the axis of Services is logarithmic
					l.XYs = append(l.XYs, plotter.XY{X: float64(max(services, 1)), Y: y.Median})
					l.YErrors = append(l.YErrors, struct{ Low, High float64 }{y.Median - y.Low, y.High - y.Median})
					l.rounds = max(l.rounds, y.Rounds)
				}
			}
			if len(l.XYs) > 0 {
				all = append(all, l)
			}
		}
	}

	return all
}

// WritePlots writes a plot of each chart that has values to a folder, which it makes,
// as SVG.
func (r *Run) WritePlots(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("folder of the plots: %w", err)
	}
	v := r.view()
	for _, c := range charts {
		lines := v.lines(c)
		if lines == nil {
			continue
		}
		p, err := c.plot(lines)
		if err != nil {
			return fmt.Errorf("plot %s: %w", c.file, err)
		}
		var svg bytes.Buffer
		from, err := p.WriterTo(24*vg.Centimeter, 12*vg.Centimeter, "svg")
		if err == nil {
			_, err = from.WriteTo(&svg)
		}
		if err != nil {
			return fmt.Errorf("plot %s: %w", c.file, err)
		}
		// A reader's machine may lack gonum's typeface.
		text := bytes.ReplaceAll(svg.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:'Liberation Sans',Arial,sans-serif;"))
		if err := os.WriteFile(filepath.Join(folder, c.file+".svg"), text, 0o644); err != nil {
			return fmt.Errorf("plot %s: %w", c.file, err)
		}
	}

	return nil
}

// plot draws the lines with axes that are as long as the values need.
func (c chart) plot(lines []line) (*plot.Plot, error) {
	p := plot.New()
	sans := font.Font{Typeface: "Liberation", Variant: "Sans"}
	for text, size := range map[*draw.TextStyle]vg.Length{
		&p.Title.TextStyle: 11, &p.X.Label.TextStyle: 10, &p.Y.Label.TextStyle: 10, &p.X.Tick.Label: 10, &p.Y.Tick.Label: 10, &p.Legend.TextStyle: 10,
	} {
		text.Font = font.From(sans, size)
	}
	p.Legend.Top, p.Legend.Padding, p.Legend.ThumbnailWidth = true, vg.Points(4), vg.Points(28)
	p.Legend.XOffs = -vg.Points(8)
	rounds, services := 0, plot.ConstantTicks(nil)
	low, high := math.Inf(1), 0.0
	for _, l := range lines {
		rounds = max(rounds, l.rounds)
		for i, point := range l.XYs {
			services = append(services, plot.Tick{Value: point.X, Label: groupThousands(point.X)})
			low, high = min(low, point.Y-l.YErrors[i].Low), max(high, point.Y+l.YErrors[i].High)
		}
	}
	slices.SortFunc(services, func(a, b plot.Tick) int { return int(a.Value - b.Value) })
	services = slices.Compact(services)
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, services
	// The legend has the last third of the plot.
	p.X.Min = services[0].Value / 1.6
	p.X.Max = services[len(services)-1].Value * 1.6
	p.X.Max *= math.Pow(p.X.Max/p.X.Min, 0.35)
	p.X.Label.Text, p.Y.Label.Text = "Services in the cluster, logarithmic", c.y
	if c.against == absolute && low > 0 && high/low > 6 {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, decadeTicks{}
		p.Y.Min, p.Y.Max = low/1.4, high*1.4
		p.Y.Label.Text += ", logarithmic"
	} else {
		p.Y.Min, p.Y.Max = min(0, low*1.1), max(high*1.1, 1e-6)
		p.Y.Tick.Marker = plot.TickerFunc(func(low, high float64) []plot.Tick {
			ticks := plot.DefaultTicks{}.Ticks(low, high)
			for i, tick := range ticks { // also the minor ones
				ticks[i].Label = strconv.FormatFloat(tick.Value, 'g', 4, 64)
			}

			return ticks
		})
	}
	p.Title.Text = c.title + "\n" + c.note
	if p.Title.Text += "Measured once."; rounds > 1 {
		p.Title.Text = fmt.Sprintf("%s\n%sMedians of %d rounds, bars: their quartiles.", c.title, c.note, rounds)
	}
	p.Add(plotter.NewGrid())
	if c.against != absolute {
		p.Y.Max = max(p.Y.Max, 1.1)
		unity := plotter.NewFunction(func(float64) float64 { return 1 })
		unity.XMin, unity.XMax, unity.Samples, unity.Dashes = p.X.Min, p.X.Max, 2, []vg.Length{1.5, 2}
		p.Add(unity)
	}
	for i, l := range lines {
		// Lines are a little beside each other, so that no error bar hides another.
		for point := range l.XYs {
			l.XYs[point].X *= math.Pow(1.03, float64(i)-float64(len(lines)-1)/2)
		}
		curve, marks, err := plotter.NewLinePoints(l.XYs)
		if err != nil {
			return nil, fmt.Errorf("line of %s: %w", l.title, err)
		}
		bars, err := plotter.NewYErrorBars(l)
		if err != nil {
			return nil, fmt.Errorf("quartiles of %s: %w", l.title, err)
		}
		look := lookOf(l.side)
		curve.Color, curve.Width, bars.Color = look.color, vg.Points(1.6), look.color
		marks.GlyphStyle = draw.GlyphStyle{Color: look.color, Radius: vg.Points(3.5), Shape: look.shape}
		if l.dashed {
			curve.Dashes, curve.Width, marks.Radius = []vg.Length{4, 3}, vg.Points(1.1), vg.Points(2.2)
		}
		p.Add(curve, bars, marks)
		p.Legend.Add(l.title, curve, marks)
	}

	return p, nil
}

// look is the appearance of a side in every plot.
type look struct {
	color color.Color
	shape draw.GlyphDrawer
}

// looks are distinguishable without colours, and for the colour-blind.
var looks = map[string]look{
	Ref:            {color.RGBA{R: 0x60, G: 0x60, B: 0x60, A: 0xff}, draw.PlusGlyph{}},
	Sluice:         {color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, draw.CircleGlyph{}},
	IPTables:       {color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}, draw.PyramidGlyph{}},
	IPTablesLegacy: {color.RGBA{R: 0xcc, G: 0x8f, B: 0x00, A: 0xff}, draw.TriangleGlyph{}},
	NFTables:       {color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, draw.BoxGlyph{}},
	IPVS:           {color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, draw.CrossGlyph{}},
}

// lookOf returns the look of a side. One that is not in the table is black.
func lookOf(side string) look {
	if l, ok := looks[side]; ok {
		return l
	}

	return look{color.Black, draw.RingGlyph{}}
}

// decadeTicks are ticks at 1, 2 and 5 times powers of ten: gonum's have labels at powers
// of ten only, of which a short axis may have none.
type decadeTicks struct{}

// Ticks implements [plot.Ticker].
func (decadeTicks) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for decade := math.Pow10(int(math.Floor(math.Log10(low)))); decade <= high; decade *= 10 {
		for digit := 1.0; digit < 10; digit++ {
			tick := plot.Tick{Value: digit * decade}
			if digit == 1 || high/low <= 2000 && (digit == 2 || digit == 5) {
				tick.Label = strconv.FormatFloat(tick.Value, 'g', 4, 64)
			}
			if low <= tick.Value && tick.Value <= high {
				ticks = append(ticks, tick)
			}
		}
	}

	return ticks
}
