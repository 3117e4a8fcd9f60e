package reconcile

import (
	"fmt"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// algorithms are those of package lb as the map has them.
var algorithms = [...]uint8{
	lb.DefaultAlgorithm:      maps.AlgorithmRandom,
	lb.Random:                maps.AlgorithmRandom,
	lb.RoundRobin:            maps.AlgorithmRR,
	lb.LeastConnections:      maps.AlgorithmLC,
	lb.ShortestExpectedDelay: maps.AlgorithmSED,
	lb.NeverQueue:            maps.AlgorithmNQ,
	lb.SourceHash:            maps.AlgorithmSH,
	lb.DestinationHash:       maps.AlgorithmDH,
	lb.Maglev:                maps.AlgorithmMaglev,
}

// programmable returns a as the map has it; what the map does not know is random.
func programmable(a lb.Algorithm) uint8 {
	if int(a) >= len(algorithms) {
		return maps.AlgorithmRandom
	}

	return algorithms[a]
}

// AlgorithmText returns the name of an algorithm that the map has, as
// [lb.ParseAlgorithm] reads it, its number if it has none.
func AlgorithmText(programmed uint8) string {
	for a := lb.Random; int(a) < len(algorithms); a++ {
		if algorithms[a] == programmed {
			return a.String()
		}
	}

	return fmt.Sprint(programmed)
}

// Hashes says whether an algorithm, as the map has it, needs a table.
func Hashes(programmed uint8) bool {
	return programmed == maps.AlgorithmSH || programmed == maps.AlgorithmDH || programmed == maps.AlgorithmMaglev
}
