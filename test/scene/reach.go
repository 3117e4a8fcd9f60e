package scene

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// MustReach waits until the pods of these names answer, all of them and nobody
// else.
func MustReach(t testing.TB, d Dial, want ...string) {
	t.Helper()
	want = slices.Sorted(slices.Values(want))
	for deadline := time.Now().Add(Patience); ; {
		err := d.reaches(want)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: after %v: %v", d, Patience, err)
		}
	}
}

// reaches dials so often that no backend is missed by chance: one of n with n in
// 5·10⁸.
func (d Dial) reaches(want []string) error {
	met := make(map[string]bool)
	for range 20 * len(want) {
		answer, err := d.Ask()
		if err != nil {
			return err
		}
		if !slices.Contains(want, answer.Name) {
			return fmt.Errorf("%s answers, want %v", answer.Name, want)
		}
		met[answer.Name] = true
	}
	if len(met) != len(want) {
		return fmt.Errorf("%v answer, want %v", met, want)
	}

	return nil
}

// Refusal is how a client is told no.
type Refusal struct{ atSocket, atDevice unix.Errno }

func (r Refusal) of(c *Client) unix.Errno {
	if c.AtSocket {
		return r.atSocket
	}

	return r.atDevice
}

var (
	// Rejected is kube-proxy's REJECT: everybody is refused at once.
	Rejected = Refusal{unix.ECONNREFUSED, unix.ECONNREFUSED}
	// Dropped is kube-proxy's DROP: packets vanish, sockets are told at once.
	Dropped = Refusal{unix.EHOSTUNREACH, unix.ETIMEDOUT}
	// Untouched is what nobody translates and nobody routes: it is lost at the
	// gateway.
	Untouched = Refusal{unix.ETIMEDOUT, unix.ETIMEDOUT}
)

// MustFail waits until a client is told no in this way.
func MustFail(t testing.TB, d Dial, how Refusal) {
	t.Helper()
	Must(t, d.fails(how))
}

// MustAllFail is [MustFail] for several, at the same time: silence takes long.
func MustAllFail(t testing.TB, how Refusal, dials ...Dial) {
	t.Helper()
	var all errgroup.Group
	for _, d := range dials {
		all.Go(func() error { return d.fails(how) })
	}
	Must(t, all.Wait())
}

// fails waits until the client is told no. A device may keep silent instead of
// refusing for a while: refusals have a limit for each client.
func (d Dial) fails(how Refusal) error {
	want := how.of(d.From)
	met := 0
	for deadline := time.Now().Add(Patience); met < 2; {
		answer, err := d.Ask()
		switch {
		case errors.Is(err, want):
			met++
		case met > 0 && !errors.Is(err, unix.ETIMEDOUT):
			return fmt.Errorf("%s: answer of %q, %v after %v", d, answer.Name, err, want)
		case time.Now().After(deadline):
			return fmt.Errorf("%s: after %v: answer of %q, %v, want %v", d, Patience, answer.Name, err, want)
		}
		if met > 0 && want == unix.ETIMEDOUT {
			return nil // once is slow enough
		}
	}

	return nil
}
