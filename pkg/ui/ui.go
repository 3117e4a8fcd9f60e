// Package ui serves the page of `kubectl sluice ui`: Services, their backends and who calls them, as a live
// picture. [Collect] asks the nodes for it, [Server] shows it in a browser of this machine.
package ui

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	_ "embed" // the page
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"sync/atomic"
	"time"

	"github.com/sluice-lb/sluice/pkg/health"
)

//go:embed page.html
var page []byte

// Server serves the page to browsers on this machine that know its token.
type Server struct {
	// Collect returns the picture of this moment. It is called for a browser that waits, once at a time.
	Collect func(context.Context) (Picture, error)

	listener net.Listener
	token    string
	turn     chan struct{} // taken by who collects
	last     atomic.Pointer[kept]
}

// kept is the last picture, and until when it is the newest that there is: collecting has to cost nodes and the API server
// little.
type kept struct {
	Picture
	rest time.Time
}

// isNewTo reports whether there is a picture, and a browser that has the one of a time does not have it.
func (k *kept) isNewTo(at string) bool { return k != nil && k.Time.Format(time.RFC3339Nano) != at }

// rests reports whether there is a picture, and it is not yet time for the next.
func (k *kept) rests() bool { return k != nil && time.Until(k.rest) > 0 }

// restFactor is how much longer than it took to collect a picture none is collected afterwards.
const restFactor = 5

// Listen returns a server that listens on a port of 127.0.0.1, or on a free one if port is 0.
func Listen(port int, collect func(context.Context) (Picture, error)) (*Server, error) {
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return nil, fmt.Errorf("--port %d: %w", port, err)
	}

	return &Server{Collect: collect, listener: listener, token: rand.Text(), turn: make(chan struct{}, 1)}, nil
}

// URL is the address of the page. A program that knows it sees what nodes answer.
func (s *Server) URL() string { return "http://" + s.listener.Addr().String() + "/?token=" + s.token }

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	server := &http.Server{Handler: s.handler(ctx), ReadHeaderTimeout: 10 * time.Second}
	if err := health.ServeUntil(ctx, server, s.listener); err != nil {
		return fmt.Errorf("page: %w", err)
	}

	return nil
}

// handler answers requests that have the token, and name this server as the host: a page of another site that
// had its name lead to 127.0.0.1 would name that site. It allows no other site to read the answers. Pictures are collected
// until ctx ends.
func (s *Server) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", policy)
		_, _ = w.Write(page) // or the browser has gone
	})
	mux.HandleFunc("GET /picture", func(w http.ResponseWriter, r *http.Request) { s.picture(ctx, w, r) })

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		known := subtle.ConstantTimeCompare([]byte(r.URL.Query().Get("token")), []byte(s.token)) == 1
		if !known || r.Host != s.listener.Addr().String() {
			http.Error(w, "Open the address that kubectl sluice ui printed: it has a token.", http.StatusForbidden)

			return
		}
		for name, value := range map[string]string{
			"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
		} {
			w.Header().Set(name, value)
		}
		mux.ServeHTTP(w, r)
	})
}

// picture answers with a picture that the browser does not have yet: after names the one that it has by its time. Several
// browsers take turns, and get the same; one that has no picture gets the last one at once while the nodes rest or are asked.
// A picture that is being collected is for all browsers: it does not matter if the one that began it has gone.
func (s *Server) picture(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	after := r.URL.Query().Get("after")
	if last := s.last.Load(); last.isNewTo(after) && (last.rests() || len(s.turn) > 0) {
		last.answer(w)

		return
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-r.Context().Done():
		return
	}
	last := s.last.Load() // it may be another one by now
	if !last.isNewTo(after) || !last.rests() {
		if last.rests() {
			select {
			case <-time.After(time.Until(last.rest)):
			case <-r.Context().Done():
				return
			}
		}
		begun := time.Now()
		picture, err := s.Collect(ctx)
		if err := cmp.Or(err, ctx.Err()); err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)

			return
		}
		last = &kept{picture, time.Now().Add(restFactor * time.Since(begun))}
		s.last.Store(last)
	}
	last.answer(w)
}

// answer sends a picture, with the rest that is left.
func (k *kept) answer(w http.ResponseWriter) {
	picture := k.Picture
	picture.Rest = max(0, time.Until(k.rest)).Milliseconds()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(picture) // or the browser has gone
}

// policy lets the page run its own script and style, and ask this server, and nothing else.
var policy = fmt.Sprintf("default-src 'none'; connect-src 'self'; script-src 'sha256-%s'; style-src 'sha256-%s'",
	hashOf("script"), hashOf("style"))

// hashOf returns the hash of the content of an element of the page, as browsers compute it.
func hashOf(element string) string {
	content := regexp.MustCompile(`(?s)<` + element + `>(.*)</` + element + `>`).FindSubmatch(page)[1]
	sum := sha256.Sum256(content)

	return base64.StdEncoding.EncodeToString(sum[:])
}
