package e2e

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// How long a change may take until clients see it. It takes milliseconds; the
// machine may be compiling.
const waitTimeout = 10 * time.Second

// dial is a client with what it dials.
type dial struct {
	from    *lab.Caller
	network string // tcp or udp
	address string
}

func (d dial) String() string { return d.network + " " + d.address }

// mustReach waits until the pods of these names answer, all of them and no others. It returns how long it took until the first of them did.
func mustReach(t testing.TB, d dial, want ...string) time.Duration {
	t.Helper()
	slices.Sort(want)
	var first time.Duration
	start := time.Now()
	for deadline := start.Add(waitTimeout); ; {
		err := d.reaches(want, func() {
			if first == 0 {
				first = time.Since(start)
			}
		})
		if err == nil {
			return first
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: after %v: %v", d, waitTimeout, err)
		}
	}
}

// reaches dials so often that no backend is missed by chance (1 in 10⁸ for
// six). Right is called when one of those that should answer does.
func (d dial) reaches(want []string, right func()) error {
	var answered []string
	for range 25 * len(want) {
		name, err := d.ask()
		if err != nil {
			return err
		}
		if !slices.Contains(want, name) {
			return fmt.Errorf("%s answers, want %v", name, want)
		}
		right()
		if !slices.Contains(answered, name) {
			answered = append(answered, name)
		}
	}
	slices.Sort(answered)
	if !slices.Equal(answered, want) {
		return fmt.Errorf("%v answer, want %v", answered, want)
	}

	return nil
}

// ask returns the name of the pod that answers.
func (d dial) ask() (string, error) {
	reply, err := d.from.Exchange(lab.Exchange{Network: d.network, Address: d.address, Timeout: 200 * time.Millisecond})
	if err != nil {
		return "", err
	}
	answer, err := lab.ParseAnswer(reply.Text)

	return answer.Name, err
}

// mustFail waits until dialling fails with an errno, every time.
func mustFail(t testing.TB, d dial, want unix.Errno) {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); ; {
		name, err := d.ask()
		if errors.Is(err, want) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: after %v: answer of %q, %v, want %v", d, waitTimeout, name, err, want)
		}
	}
	for range 5 {
		if name, err := d.ask(); !errors.Is(err, want) {
			t.Fatalf("%s: answer of %q, %v, want %v again", d, name, err, want)
		}
		if want == unix.ETIMEDOUT {
			return // once is slow enough
		}
	}
}
