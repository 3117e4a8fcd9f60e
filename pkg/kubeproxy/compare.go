package kubeproxy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Difference is one field of a frontend in which kube-proxy's rules differ from what is programmed here.
type Difference struct {
	Service   string `json:"service"`  // namespace/name:port
	Frontend  string `json:"frontend"` // "10.96.0.1:80/TCP internal"
	Field     string `json:"field"`
	KubeProxy string `json:"kubeProxy"`
	Sluice    string `json:"sluice"`
}

// Compare returns how the rules differ from the frontends that are programmed, sorted by Service. Frontends of port 0
// are not compared: they refuse what no rule of iptables mode concerns.
func (r Rules) Compare(programmed []status.Frontend) []Difference {
	ours := make(map[lb.FrontendKey]status.Frontend)
	for _, f := range programmed {
		if f.Address.Port() != 0 {
			ours[f.Key()] = f
		}
	}
	differences := []Difference{}
	compare := func(of status.Frontend, field, theirs, ours string) {
		if theirs != ours {
			differences = append(differences, Difference{of.Service, nameOf(of), field, theirs, ours})
		}
	}
	for _, theirs := range r.Frontends {
		our, ok := ours[theirs.Key()]
		if !ok {
			compare(theirs, "exists", "true", "false")

			continue
		}
		delete(ours, theirs.Key())
		compare(our, "service", theirs.Service, our.Service)
		compare(our, "backends", listOf(theirs.Backends), listOf(our.Backends))
		compare(our, "whenEmpty", theirs.WhenEmpty, our.WhenEmpty)
		if len(theirs.Backends) > 0 { // otherwise rules have none
			compare(our, "affinitySeconds", fmt.Sprint(theirs.AffinitySeconds), fmt.Sprint(our.AffinitySeconds))
		}
		if len(theirs.Backends) > 0 || r.Mode == NFTables { // iptables mode has no ranges of Services without endpoints
			compare(our, "sourceRanges", rangesOf(theirs.SourceRanges), rangesOf(our.SourceRanges))
		}
	}
	for _, our := range ours {
		compare(our, "exists", "false", "true")
	}
	slices.SortFunc(differences, func(a, b Difference) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Frontend, b.Frontend), cmp.Compare(a.Field, b.Field))
	})

	return differences
}

// CompareNodePorts returns how the addresses of this node that node ports answer on differ: programmed are
// those of Sluice, all are the node's. A family without node ports is not compared; one without NodePortAddrs has all.
func (r Rules) CompareNodePorts(programmed, all []netip.Addr) []Difference {
	var differences []Difference
	for _, a := range all {
		sameFamily := func(other netip.Addr) bool { return other.Is4() == a.Is4() }
		if !slices.ContainsFunc(r.Frontends, func(f status.Frontend) bool {
			return f.Address.Addr().IsUnspecified() && sameFamily(f.Address.Addr())
		}) {
			continue
		}
		restricted := slices.ContainsFunc(r.NodePortAddrs, func(p netip.Prefix) bool { return sameFamily(p.Addr()) })
		theirs := !restricted || slices.ContainsFunc(r.NodePortAddrs, func(p netip.Prefix) bool { return p.Contains(a) })
		if ours := slices.Contains(programmed, a); theirs != ours {
			differences = append(differences, Difference{"all with node ports", a.String(), "nodePorts", fmt.Sprint(theirs), fmt.Sprint(ours)})
		}
	}

	return differences
}

// nameOf returns "10.96.0.1:80/TCP internal", or for a node port "node port 30080/TCP internal".
func nameOf(f status.Frontend) string {
	if f.Address.Addr().IsUnspecified() {
		family := map[bool]string{true: "IPv4", false: "IPv6"}[f.Address.Addr().Is4()]

		return fmt.Sprintf("node port %d/%s %s %s", f.Address.Port(), f.Protocol, family, f.Scope)
	}

	return f.Key().String()
}

func listOf[T fmt.Stringer](all []T) string {
	texts := make([]string, len(all))
	for i, one := range all {
		texts[i] = one.String()
	}

	return strings.Join(texts, " ")
}

// rangesOf returns a text that is the same for ranges of the same addresses.
func rangesOf(ranges []netip.Prefix) string {
	var set netipx.IPSetBuilder
	for _, p := range ranges {
		set.AddPrefix(p)
	}
	merged, err := set.IPSet()
	if err != nil {
		return err.Error()
	}

	return listOf(merged.Prefixes())
}
