package main

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// A trial of the hooks that was too slow, as on a machine that is too busy, is no difference: none has failed.
func TestVerifyTrial(t *testing.T) {
	for _, test := range []struct {
		name        string
		err         error
		differences int
		want        string
	}{
		{"well", nil, 0, "1 frontends and 2 hooks compared, 0 differences\n"},
		{"too slow", datapath.ErrSlow, 0, "hooks could not be tried: the trial takes too long\n1 frontends and 2 hooks compared, 0 differences\n"},
		{"not to be tried", fmt.Errorf("%w: fork", datapath.ErrNotProbed), 1, "- hooks could not be tried: fork\n1 frontends and 2 hooks compared, 1 differences\n"},
		{"failed", datapath.ErrNotEffective, 1, "- sockets are not translated\n1 frontends and 2 hooks compared, 1 differences\n"},
	} {
		report := verifyReport{Frontends: 1, Hooks: 2}
		report.setTrial(test.err)
		var out bytes.Buffer
		printed := newTable(&out)
		report.draw(printed)
		printed.flush()
		if len(report.Differences) != test.differences || out.String() != test.want {
			t.Errorf("%s: %d differences, %q; want %d and %q", test.name, len(report.Differences), out.String(), test.differences, test.want)
		}
	}
}

// Of three comparisons, a second apart, only what all of them find is a difference. Without one, there is no
// further comparison.
func TestLasting(t *testing.T) {
	for _, test := range []struct {
		name  string
		found [][]string
		want  []string
		takes time.Duration
	}{
		{"no difference", [][]string{nil}, []string{}, 0},
		{"some that disappear", [][]string{{"a", "b"}, {"b"}, {"c"}}, []string{}, 2 * time.Second},
		{"one that lasts", [][]string{{"a", "b"}, {"b", "a"}, {"c", "b"}}, []string{"b"}, 2 * time.Second},
		{"others each time", [][]string{{"a"}, {"b"}}, []string{}, time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				got, err := lasting(func() ([]string, error) {
					found := test.found[0]
					test.found = test.found[1:]

					return found, nil
				})
				if err != nil || got == nil || !slices.Equal(got, test.want) || time.Since(began) != test.takes {
					t.Errorf("after %v: %#v, %v; want %#v after %v", time.Since(began), got, err, test.want, test.takes)
				}
			})
		})
	}
	broken := errors.New("broken")
	if _, err := lasting(func() ([]string, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("a comparison that fails: %v", err)
	}
}

// Many differences are compared with many in a time that grows with their number, and not with its square.
func TestManyDifferences(t *testing.T) {
	many := make([]string, 200_000)
	for i := range many {
		many[i] = fmt.Sprintf("shop/web: frontend %d is not programmed", 100_000+i)
	}
	begin := time.Now()
	got, err := lasting(func() ([]string, error) { return many, nil })
	if err != nil || len(got) != len(many) {
		t.Errorf("%d differences, %v", len(got), err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
}
