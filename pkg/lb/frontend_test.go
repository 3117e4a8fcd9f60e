package lb

import (
	"testing"
)

func TestParseAlgorithm(t *testing.T) {
	for text, want := range map[string]Algorithm{
		"random": Random, "rr": RoundRobin, "lc": LeastConnections, "sed": ShortestExpectedDelay,
		"nq": NeverQueue, "sh": SourceHash, "dh": DestinationHash, "maglev": Maglev,
	} {
		got, err := ParseAlgorithm(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%q is read as %d, %q: %v", text, got, got, err)
		}
	}
}

func TestParseAlgorithmRefuses(t *testing.T) {
	for _, text := range []string{"", "default", "RR", " rr", "rr,lc", "mh", "wrr", "algorithm 1"} {
		got, err := ParseAlgorithm(text)
		want := `"` + text + `" is none of the algorithms random, rr, lc, sed, nq, sh, dh, maglev`
		if got != DefaultAlgorithm || err == nil || err.Error() != want {
			t.Errorf("%q is read as %s: %v, want %s", text, got, err, want)
		}
	}
}

func TestAlgorithmStrings(t *testing.T) {
	for algorithm, want := range map[Algorithm]string{DefaultAlgorithm: "default", Maglev: "maglev", Maglev + 1: "algorithm 9"} {
		if got := algorithm.String(); got != want {
			t.Errorf("%d reads %q, want %q", uint8(algorithm), got, want)
		}
	}
}

func TestWhichAlgorithmsHash(t *testing.T) {
	for a := DefaultAlgorithm; a <= Maglev; a++ {
		if want := a >= SourceHash; a.Hashes() != want {
			t.Errorf("%s hashes: %t", a, a.Hashes())
		}
	}
}
