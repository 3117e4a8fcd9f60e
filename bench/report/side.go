package report

import "slices"

// Names of sides.
const (
	Ref            = "ref"      // a node on which there never was a proxy
	Sluice         = "sluice"   // this project
	Baseline       = "baseline" // another build of it
	IPTables       = "iptables"
	IPTablesLegacy = "iptables-legacy"
	NFTables       = "nftables"
	IPVS           = "ipvs"
)

// Sides are all sides, in the order of the tables. All but the first three are
// modes of kube-proxy.
var Sides = []string{Ref, Sluice, Baseline, IPTables, IPTablesLegacy, NFTables, IPVS}

// isRival says whether Sluice is compared with a side.
func isRival(side string) bool {
	return side != Ref && side != Sluice
}

// compareBy compares two names by where they are in a list. What is not in
// there comes last.
func compareBy(list []string) func(a, b string) int {
	place := func(name string) int {
		if i := slices.Index(list, name); i >= 0 {
			return i
		}

		return len(list)
	}

	return func(a, b string) int { return place(a) - place(b) }
}
