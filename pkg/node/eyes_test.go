package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// eyes see what a watch tells.
type eyes struct {
	t       testing.TB
	updates chan State
	log     *lockedBuffer
}

// mustWatch watches a namespace until the test ends.
func mustWatch(t testing.TB, ns *lab.Namespace, config Config) eyes {
	t.Helper()
	file, err := os.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	config.Netns = file

	return startWatch(t, config, func(watch func()) { watch() })
}

// startWatch watches, on a goroutine that on prepares.
func startWatch(t testing.TB, config Config, on func(watch func())) eyes {
	e := eyes{t: t, updates: make(chan State, 1000), log: &lockedBuffer{}}
	config.Update = func(state State) { e.updates <- state }
	config.Log = slog.New(slog.NewTextHandler(e.log, nil))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go on(func() { ended <- Watch(ctx, config) })
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("watch: %v", err)
		}
		if config.Netns != nil {
			config.Netns.Close()
		}
	})

	return e
}

// want waits until exactly these addresses are told, link-local ones apart.
func (e eyes) want(want ...string) {
	e.t.Helper()
	e.until(fmt.Sprintf("state with the addresses %v", want), func(state State) bool {
		var got []string
		for _, address := range state.Addresses {
			if !address.Addr.IsLinkLocalUnicast() {
				got = append(got, address.Addr.String())
			}
		}

		return slices.Equal(got, want)
	})
}

// until waits for a state in which something is so.
func (e eyes) until(what string, is func(State) bool) State {
	e.t.Helper()
	var last State
	for deadline := time.After(5 * time.Second); ; {
		select {
		case last = <-e.updates:
			if is(last) {
				return last
			}
		case <-deadline:
			e.t.Fatalf("no %s; the last state is %+v", what, last)
		}
	}
}

// wantSilence waits a while and fails if anything is told.
func (e eyes) wantSilence(while time.Duration) {
	e.t.Helper()
	select {
	case state := <-e.updates:
		e.t.Fatalf("told %+v, want nothing", state)
	case <-time.After(while):
	}
}

type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buffer.String()
}
