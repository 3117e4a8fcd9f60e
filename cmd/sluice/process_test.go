package main

import "testing"

func TestOOMScoreIsLowEnough(t *testing.T) {
	for _, test := range []struct {
		name             string
		have, configured int
		want             bool
	}{
		{"the kubelet's, for kube-proxy's default", -997, -999, true},
		{"as configured", -999, -999, true},
		{"lower than configured", -500, 0, true},
		{"none from a nested runtime", 0, -999, false},
		{"of an ordinary pod", 936, -999, false},
		{"a little higher than the kubelet's", -996, -999, false},
	} {
		if got := isLowEnough(test.have, test.configured); got != test.want {
			t.Errorf("%s: %d for %d is low enough: got %t", test.name, test.have, test.configured, got)
		}
	}
}
