package e2e

import (
	"bytes"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

const troubleshootPage = "../../docs/troubleshoot.md"

// example is a verb in a page, with its output.
var example = regexp.MustCompile("(?m)^```\n\\$ sluice (explain [^\n]*)\n((?s:.*?))^```$")

// What docs/troubleshoot.md shows of sluice explain is its output, on a node with the Services of
// testdata/troubleshoot.
func TestTroubleshoot(t *testing.T) {
	ns := lab.MustNew(t, lab.Config{Nodes: 1}).Nodes[0].Namespace
	// A cache of names on the node answers at the address of the Service dns.
	lab.Must(t, ns.AddAddress("lo", netip.MustParsePrefix("10.96.0.10/32")))
	cache, err := ns.Listen("tcp", "10.96.0.10:53")
	lab.Must(t, err)
	t.Cleanup(func() { cache.Close() })
	// The node has routes of IPv6, and no address.
	addresses, err := ns.Netlink().AddrList(nil, netlink.FAMILY_V6)
	lab.Must(t, err)
	for _, a := range addresses {
		if a.IP.IsGlobalUnicast() {
			link, err := ns.Netlink().LinkByIndex(a.LinkIndex)
			lab.Must(t, err)
			lab.Must(t, ns.Netlink().AddrDel(link, &a))
		}
	}
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: ns,
		Cgroup: lab.MustCgroup(t, "e2e"), NodeName: "node-1", Manifests: "testdata/troubleshoot",
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	lab.Must(t, node.Start())
	lab.Must(t, node.WaitSynced(t.Context()))

	page, err := os.ReadFile(troubleshootPage)
	lab.Must(t, err)
	examples := 0
	rewritten := example.ReplaceAllStringFunc(string(page), func(block string) string {
		examples++
		found := example.FindStringSubmatch(block)
		var out bytes.Buffer
		if err := node.Exec(&out, &out, strings.Fields(found[1])...); err != nil {
			t.Fatalf("sluice %s: %v\n%s", found[1], err, &out)
		}
		if !*update && out.String() != found[2] {
			t.Errorf("sluice %s: the page has\n%sand the output is\n%s", found[1], found[2], &out)
		}

		return "```\n$ sluice " + found[1] + "\n" + out.String() + "```"
	})
	if examples < 9 {
		t.Errorf("only %d examples were found", examples)
	}
	if *update {
		lab.Must(t, os.WriteFile(troubleshootPage, []byte(rewritten), 0o600))
	}
}
