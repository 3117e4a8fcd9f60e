package status

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"time"
)

// part is one JSON value of a stream: the answer about Services, which may have millions of frontends and backends in all,
// is written part by part, and frontends refer to the lists that they share. So an answer takes little memory of the agent.
type part struct {
	// Service begins a Service, without its ports, and Port a port of it, without frontends and backends: these follow.
	// Lists before it are of other Services.
	Service *Service     `json:"service,omitempty"`
	Port    *ServicePort `json:"port,omitempty"`
	// Addresses and Prefixes are the next list of backends, and of source ranges, of the Service.
	Addresses []netip.AddrPort `json:"addresses,omitempty"`
	Prefixes  []netip.Prefix   `json:"prefixes,omitempty"`
	// Frontend has none of its lists: Backends and Ranges are their numbers, from 1 on; zero is an empty list.
	Frontend *Frontend `json:"frontend,omitempty"`
	Backends int       `json:"backends,omitempty"`
	Ranges   int       `json:"ranges,omitempty"`
	Backend  *Backend  `json:"backend,omitempty"`
	// End is the last part. Error is why the answer is not complete, NameError that no Service has the name that was asked for.
	End       bool      `json:"end,omitempty"`
	Error     string    `json:"error,omitempty"`
	NameError NameError `json:"nameError,omitempty"`
}

// streamType is the media type of a stream of parts.
const streamType = "application/x-ndjson"

// partTimeout limits how long a client may leave a stream unread: others wait for it.
const partTimeout = 10 * time.Second

// stream writes parts.
type stream struct {
	control  *http.ResponseController
	part     part // that is written, and the values that it refers to
	of       Service
	port     ServicePort
	front    Frontend
	out      *bufio.Writer
	encoder  *json.Encoder
	backends map[*netip.AddrPort]int // the numbers of lists of the Service, by their memory
	ranges   map[*netip.Prefix]int
}

func newStream(w http.ResponseWriter) *stream {
	out := bufio.NewWriterSize(w, 32<<10)

	return &stream{
		control: http.NewResponseController(w), out: out, encoder: json.NewEncoder(out),
		backends: make(map[*netip.AddrPort]int), ranges: make(map[*netip.Prefix]int),
	}
}

// begin begins a Service.
func (s *stream) begin(svc Service) error {
	clear(s.backends)
	clear(s.ranges)
	if err := s.extend(); err != nil {
		return err
	}
	s.of, s.of.Ports = svc, nil

	return s.write(part{Service: &s.of})
}

// write writes a part. Millions follow each other, all in the same memory.
func (s *stream) write(p part) error {
	s.part = p

	return s.encoder.Encode(&s.part)
}

// extend gives the client time to read what follows.
func (s *stream) extend() error {
	if err := s.control.SetWriteDeadline(time.Now().Add(partTimeout)); err != nil {
		return fmt.Errorf("deadline: %w", err)
	}

	return nil
}

// service writes a Service with all of its ports.
func (s *stream) service(svc Service) error {
	if err := s.begin(svc); err != nil {
		return err
	}
	for _, port := range svc.Ports {
		s.port = ServicePort{Name: port.Name, Protocol: port.Protocol}
		if err := s.write(part{Port: &s.port}); err != nil {
			return err
		}
		for _, f := range port.Frontends {
			if err := s.frontend(f); err != nil {
				return err
			}
		}
		for i := range port.Backends {
			if err := s.write(part{Backend: &port.Backends[i]}); err != nil {
				return err
			}
		}
	}

	return nil
}

// frontend writes a frontend, after the lists that it is the first to have.
func (s *stream) frontend(f Frontend) error {
	p := part{Frontend: &s.front}
	if len(f.Backends) > 0 {
		first := &f.Backends[0]
		if s.backends[first] == 0 {
			s.backends[first] = len(s.backends) + 1
			if err := s.write(part{Addresses: f.Backends}); err != nil {
				return err
			}
		}
		p.Backends = s.backends[first]
	}
	if len(f.SourceRanges) > 0 {
		first := &f.SourceRanges[0]
		if s.ranges[first] == 0 {
			s.ranges[first] = len(s.ranges) + 1
			if err := s.write(part{Prefixes: f.SourceRanges}); err != nil {
				return err
			}
		}
		p.Ranges = s.ranges[first]
	}
	s.front = f
	s.front.Backends, s.front.SourceRanges = nil, nil

	return s.write(p)
}

// end writes the last part, which says whether the answer is complete.
func (s *stream) end(err error) error {
	last := part{End: true}
	if err != nil && !errors.As(err, &last.NameError) {
		last.Error = err.Error()
	}

	return errors.Join(s.extend(), s.write(last), s.out.Flush())
}

// answerInParts returns a handler that sends what compute writes. One answer is made at a time, so that they do not take
// the memory of several.
func (s Server) answerInParts(compute func(*http.Request, *stream) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept") != streamType {
			http.Error(w, "the agent is of another version than this program", http.StatusNotAcceptable)

			return
		}
		stream := newStream(w)
		// The request was read: its time limit must not end what may wait for other answers.
		if err := stream.control.SetReadDeadline(time.Time{}); err != nil {
			s.Log.Warn("answer not sent", "request", r.URL.Path, "error", err)

			return
		}
		select {
		case s.streams <- struct{}{}:
			defer func() { <-s.streams }()
		case <-r.Context().Done():
			return
		}
		w.Header().Set("Content-Type", streamType)
		if err := stream.end(compute(r, stream)); err != nil {
			s.Log.Warn("answer not sent", "request", r.URL.Path, "error", err)
		}
	}
}

// readParts reads a stream, and calls service with each Service and frontend with each frontend that has no port before
// it. The former may keep what it gets. Frontends of a Service share their lists.
func readParts(from io.Reader, service func(Service) error, frontend func(Frontend) error) error {
	decoder := json.NewDecoder(bufio.NewReaderSize(from, 64<<10))
	var backends [][]netip.AddrPort
	var ranges [][]netip.Prefix
	var svc *Service
	done := func() error {
		if svc == nil {
			return nil
		}

		return service(*svc)
	}
	for {
		var p part
		if err := decoder.Decode(&p); err != nil {
			return fmt.Errorf("it is not complete: %w", err)
		}
		switch {
		case p.End && p.NameError != "":
			return p.NameError
		case p.End && p.Error != "":
			return errors.New(p.Error)
		case p.End:
			return done()
		case p.Service != nil:
			if err := done(); err != nil {
				return err
			}
			svc, backends, ranges = p.Service, nil, nil
			svc.Ports = []ServicePort{}
		case p.Port != nil && svc != nil:
			p.Port.Frontends, p.Port.Backends = []Frontend{}, []Backend{}
			svc.Ports = append(svc.Ports, *p.Port)
		case p.Addresses != nil:
			backends = append(backends, p.Addresses)
		case p.Prefixes != nil:
			ranges = append(ranges, p.Prefixes)
		case p.Frontend != nil && p.Backends <= len(backends) && p.Ranges <= len(ranges):
			f := *p.Frontend
			f.Backends = []netip.AddrPort{}
			if p.Backends > 0 {
				f.Backends = backends[p.Backends-1]
			}
			if p.Ranges > 0 {
				f.SourceRanges = ranges[p.Ranges-1]
			}
			if svc == nil || len(svc.Ports) == 0 {
				if err := frontend(f); err != nil {
					return err
				}

				continue
			}
			port := &svc.Ports[len(svc.Ports)-1]
			port.Frontends = append(port.Frontends, f)
		case p.Backend != nil && svc != nil && len(svc.Ports) > 0:
			port := &svc.Ports[len(svc.Ports)-1]
			port.Backends = append(port.Backends, *p.Backend)
		default:
			return errors.New("it has a part that this program does not know")
		}
	}
}

// askInParts asks as ask does, for an answer in parts. An agent of an older build answers in one, an array, which it reads
// with older.
func askInParts(ctx context.Context, c *Client, path string, service func(Service) error, frontend func(Frontend) error, older func(*json.Decoder) error) error {
	if err := c.ping(ctx); err != nil {
		return err
	}
	response, err := c.get(ctx, path)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.Header.Get("Content-Type") == streamType {
		err = readParts(response.Body, service, frontend)
	} else {
		err = older(json.NewDecoder(response.Body))
	}
	if err != nil && !errors.As(err, new(NameError)) {
		return fmt.Errorf("agent: %s: %w", path, err)
	}

	return err
}
