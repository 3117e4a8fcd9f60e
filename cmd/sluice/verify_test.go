package main

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

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
