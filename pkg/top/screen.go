package top

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
)

// history is how many readings a sparkline shows.
const history = 12

// screen is the table in a terminal, and what a person has chosen there.
type screen struct {
	read     func() (*Sample, error)
	interval time.Duration
	all      bool // show quiet Services, too

	last  *Sample // never nil
	table Table
	err   error                // of the last reading
	fresh map[string][]float64 // the last rates of new connections, by Service

	order    string
	selected string // the Service under the cursor, empty before there is one
	opened   bool   // show its backends
	first    int    // the first of them that is shown
	width    int
	height   int
}

// Config configures [Show].
type Config struct {
	Interval time.Duration // between readings
	Order    string        // one of [Orders]
	All      bool          // also show quiet Services
	Service  string        // begin with the backends of this one, if it is not empty
}

// Show shows a table in a terminal until a person ends it, or ctx. It begins with a first sample of r.
func Show(ctx context.Context, r *Reader, first *Sample, cfg Config, in io.Reader, out io.Writer) error {
	s := newScreen(r.Read, first, cfg)
	_, err := tea.NewProgram(s, tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out)).Run()
	if errors.Is(err, tea.ErrInterrupted) || ctx.Err() != nil {
		return nil
	}

	return err
}

func newScreen(read func() (*Sample, error), first *Sample, cfg Config) *screen {
	s := &screen{
		read: read, interval: cfg.Interval, last: first, table: Between(nil, first, true), fresh: make(map[string][]float64),
		order: cfg.Order, all: cfg.All, selected: cfg.Service, opened: cfg.Service != "",
	}
	s.arrange()

	return s
}

// sampled is the message that a reading is done.
type sampled struct {
	sample *Sample
	err    error
}

// due is the message that the next reading is due.
type due struct{}

// Init implements [tea.Model].
func (s *screen) Init() tea.Cmd { return s.wait() }

// wait returns the command to wait for the next reading.
func (s *screen) wait() tea.Cmd {
	return tea.Tick(s.last.Pause(s.interval), func(time.Time) tea.Msg { return due{} })
}

// Update implements [tea.Model].
func (s *screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case due:
		return s, func() tea.Msg {
			sample, err := s.read()

			return sampled{sample, err}
		}
	case sampled:
		s.add(msg)

		return s, s.wait()
	case tea.WindowSizeMsg:
		s.width, s.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		return s, s.press(msg.String())
	}

	return s, nil
}

// add shows a reading.
func (s *screen) add(msg sampled) {
	if s.err = msg.err; msg.err != nil {
		return
	}
	s.table = Between(s.last, msg.sample, true)
	fresh := make(map[string][]float64)
	for _, svc := range s.table.Services {
		points := append(s.fresh[svc.Service], svc.New)
		fresh[svc.Service] = points[max(0, len(points)-history):]
	}
	s.last, s.fresh = msg.sample, fresh
	s.arrange()
}

// arrange applies what a person has chosen.
func (s *screen) arrange() {
	_ = s.table.Sort(s.order) // it is one of Orders
	shown := s.shown()
	s.table.Quiet = len(s.table.Services) - len(shown)
	chosen := slices.ContainsFunc(shown, func(svc Service) bool { return svc.Service == s.selected })
	if !chosen && !s.opened && len(shown) > 0 {
		s.selected = shown[0].Service
	}
}

// shown returns the Services that are listed. One that was not quiet before stays while its sparkline shows
// that.
func (s *screen) shown() []Service {
	return slices.DeleteFunc(slices.Clone(s.table.Services), func(svc Service) bool {
		busy := slices.ContainsFunc(s.fresh[svc.Service], func(n float64) bool { return n > 0 })

		return !s.all && !busy && svc.isQuiet() && svc.Service != s.selected
	})
}

// chosen returns the Service under the cursor, or nil if it is gone.
func (s *screen) chosen() *Service {
	i := slices.IndexFunc(s.table.Services, func(svc Service) bool { return svc.Service == s.selected })
	if i < 0 {
		return nil
	}

	return &s.table.Services[i]
}

// press acts on a key, and returns the command to end if it is for that.
func (s *screen) press(key string) tea.Cmd {
	shown := s.shown()
	at := max(0, slices.IndexFunc(shown, func(svc Service) bool { return svc.Service == s.selected }))
	move := func(by int) {
		switch {
		case s.opened:
			if svc := s.chosen(); svc != nil {
				s.first = max(0, min(s.first+by, len(svc.Backends)-s.rows()))
			}
		case len(shown) > 0:
			s.selected = shown[min(max(at+by, 0), len(shown)-1)].Service
		}
	}
	sortBy := func(by int) {
		i := slices.Index(Orders(), s.order) + by
		s.order = Orders()[(i+len(columns))%len(columns)]
	}
	switch key {
	case "q", "ctrl+c":
		return tea.Quit
	case "up", "k":
		move(-1)
	case "down", "j":
		move(1)
	case "pgup":
		move(-s.rows())
	case "pgdown":
		move(s.rows())
	case "home", "g":
		move(-len(shown))
	case "end", "G":
		move(len(shown))
	case "enter":
		s.opened, s.first = s.selected != "", 0
	case "esc", "backspace":
		s.opened = false
	case "right", ">", "s":
		sortBy(1)
	case "left", "<":
		sortBy(-1)
	case "a":
		s.all = !s.all
	}
	s.arrange()

	return nil
}

// rows is how many rows of a table the window has room for: without the summary, titles and keys.
func (s *screen) rows() int { return max(1, s.height-4) }

const (
	reversed = "\x1b[7m"
	plain    = "\x1b[m"
)

// View implements [tea.Model].
func (s *screen) View() tea.View {
	summary, keys := s.table.summary(), "↑↓ choose · enter backends · ←→ sort · a all · q quit"
	var titles string
	var rows []string
	at := -1
	switch {
	case s.opened:
		keys = "↑↓ scroll · esc back · q quit"
		if svc := s.chosen(); svc == nil {
			summary = s.selected + " is gone"
		} else {
			summary = s.table.At.Format(time.TimeOnly) + "  " + svc.summary() + "  " + sparkline(s.fresh[svc.Service])
			aligned := align(backendCells(svc))
			titles, rows = "  "+aligned[0], aligned[1:]
		}
	default:
		shown := s.shown()
		aligned := s.table.lines(s.columns(), shown)
		titles, rows = "  "+aligned[0], aligned[1:]
		at = slices.IndexFunc(shown, func(svc Service) bool { return svc.Service == s.selected })
	}
	if s.err != nil {
		summary = "error: " + s.err.Error()
	}
	first := at - s.rows()/2 // the chosen row is in the middle
	if s.opened {
		first = s.first
	}
	first = max(0, min(first, len(rows)-s.rows()))
	lines := []string{s.clip(summary), "", reversed + s.clip(titles) + plain}
	for i := first; i < min(first+s.rows(), len(rows)); i++ {
		line := s.clip("  " + rows[i])
		if i == at {
			line = s.clip("▶ " + rows[i])
		}
		lines = append(lines, line)
	}
	for len(lines) < s.height-1 {
		lines = append(lines, "")
	}
	view := tea.NewView(strings.Join(append(lines, s.clip(keys)), "\n"))
	view.AltScreen = true

	return view
}

// clip cuts a line at the width of the window.
func (s *screen) clip(line string) string {
	if utf8.RuneCountInString(line) <= s.width {
		return line
	}

	return string([]rune(line)[:s.width])
}

// columns returns those of the table of Services, with a sparkline behind the rate of new connections.
func (s *screen) columns() []column {
	var all []column
	for _, c := range columns {
		if c.key == s.order {
			c.title += "▼"
		}
		all = append(all, c)
		if c.key == "new" {
			all = append(all, column{text: func(svc *Service) string { return sparkline(s.fresh[svc.Service]) }})
		}
	}

	return all
}

// sparkline draws rates, the largest of them as a full block.
func sparkline(rates []float64) string {
	const levels = "▁▂▃▄▅▆▇█"
	most := 0.0
	for _, rate := range rates {
		most = max(most, rate)
	}
	line := strings.Repeat(" ", history-len(rates))
	for _, rate := range rates {
		level := 0
		if most > 0 {
			level = int(rate / most * 7)
		}
		line += string([]rune(levels)[level])
	}

	return line
}
