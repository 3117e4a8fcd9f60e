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

// observer receives what a watch reports.
type observer struct {
	t       testing.TB
	updates chan State
	log     *lockedBuffer
}

// mustWatch watches a namespace until the test ends.
func mustWatch(t testing.TB, ns *lab.Namespace, config Config) observer {
	t.Helper()
	file, err := os.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	config.Netns = file

	return startWatch(t, config, func(watch func()) { watch() })
}

// startWatch watches until the test ends, on a goroutine that on prepares.
func startWatch(t testing.TB, config Config, on func(watch func())) observer {
	o := observer{t: t, updates: make(chan State, 1000), log: &lockedBuffer{}}
	config.Update = func(state State) { o.updates <- state }
	config.Log = slog.New(slog.NewTextHandler(o.log, nil))
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

	return o
}

// want waits until exactly these addresses are reported, not counting link-local ones.
func (o observer) want(want ...string) {
	o.t.Helper()
	o.until(fmt.Sprintf("state with the addresses %v", want), func(state State) bool {
		var got []string
		for _, address := range state.Addresses {
			if !address.Addr.IsLinkLocalUnicast() {
				got = append(got, address.Addr.String())
			}
		}

		return slices.Equal(got, want)
	})
}

// until waits for a state that fulfils a condition.
func (o observer) until(what string, is func(State) bool) State {
	o.t.Helper()
	var last State
	for deadline := time.After(5 * time.Second); ; {
		select {
		case last = <-o.updates:
			if is(last) {
				return last
			}
		case <-deadline:
			o.t.Fatalf("no %s; the last state is %+v", what, last)
		}
	}
}

// wantNoUpdate waits a while and fails the test if anything is reported.
func (o observer) wantNoUpdate(while time.Duration) {
	o.t.Helper()
	select {
	case state := <-o.updates:
		o.t.Fatalf("reported %+v, want nothing", state)
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
