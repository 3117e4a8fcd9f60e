package scene

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// MustReach waits until the pods of these names answer, all of them and no others.
func MustReach(t testing.TB, d Dial, want ...string) {
	t.Helper()
	for deadline := time.Now().Add(lab.Timeout); ; {
		err := d.Reaches(want...)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: after %v: %v", d, lab.Timeout, err)
		}
	}
}

// Reaches returns nil if these pods answer, and no others. It dials so often that no
// backend is missed by chance: the probability is one in 5·10⁸.
func (d Dial) Reaches(want ...string) error {
	answered := make(map[string]bool)
	for range 20 * len(want) {
		answer, err := d.Ask()
		if err != nil {
			return err
		}
		if !slices.Contains(want, answer.Name) {
			return fmt.Errorf("%s answers, want %v", answer.Name, want)
		}
		answered[answer.Name] = true
	}
	if len(answered) != len(want) {
		return fmt.Errorf("%v answer, want %v", answered, want)
	}

	return nil
}

// Refusal is the error that a client gets when it is refused or dropped.
type Refusal struct{ atSocket, atDevice unix.Errno }

func (r Refusal) of(d Dial) unix.Errno {
	if d.isAtSocket() {
		return r.atSocket
	}

	return r.atDevice
}

// isAtSocket reports whether the client is refused at its socket. A connect() of UDP is not: its datagrams are, where
// they pass a device.
func (d Dial) isAtSocket() bool { return d.From.AtSocket && d.Network != "udp" }

var (
	// Rejected is kube-proxy's REJECT: every client is refused at once.
	Rejected = Refusal{unix.ECONNREFUSED, unix.ECONNREFUSED}
	// Dropped is kube-proxy's DROP: packets vanish, sockets get an error at once.
	Dropped = Refusal{unix.EHOSTUNREACH, unix.ETIMEDOUT}
	// Untouched is traffic without a translation and without a route: the gateway drops it.
	Untouched = Refusal{unix.ETIMEDOUT, unix.ETIMEDOUT}
)

// MustFail waits until a client is refused or dropped in this way.
func MustFail(t testing.TB, d Dial, how Refusal) {
	t.Helper()
	lab.Must(t, d.fails(how))
}

// MustAllFail is [MustFail] for several, at the same time: a timeout takes long.
func MustAllFail(t testing.TB, how Refusal, dials ...Dial) {
	t.Helper()
	var all errgroup.Group
	for _, d := range dials {
		all.Go(func() error { return d.fails(how) })
	}
	lab.Must(t, all.Wait())
}

// fails waits until the client is refused or dropped, several times in succession. A
// device may drop instead of refusing for a while: refusals have a limit for each client.
func (d Dial) fails(how Refusal) error {
	want, times := how.of(d), 2
	if d.isAtSocket() {
		times = 6 // which takes no time
	}
	refused := 0
	for deadline := time.Now().Add(lab.Timeout); refused < times; {
		answer, err := d.Ask()
		switch {
		case errors.Is(err, want):
			refused++
		case refused > 0 && (d.isAtSocket() || !errors.Is(err, unix.ETIMEDOUT)):
			return fmt.Errorf("%s: answer of %q, %v after %v", d, answer.Name, err, want)
		case time.Now().After(deadline):
			return fmt.Errorf("%s: after %v: answer of %q, %v, want %v", d, lab.Timeout, answer.Name, err, want)
		}
		if refused > 0 && want == unix.ETIMEDOUT {
			return nil // a timeout is not repeated: it takes long
		}
	}

	return nil
}
