package node

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Each case sets the sysctls of a network namespace of its own.
func TestMasqueradePorts(t *testing.T) {
	for _, test := range []struct {
		name                string
		ephemeral, reserved string
		want                string // the largest first; "" is none
	}{
		{"all that are left by default", "32768 60999", "", "1024-29999 61000-65535"},
		{"above ephemeral ports that begin early", "10000 40000", "", "40001-65535 1024-9999"},
		{"between ephemeral ports and node ports", "1024 15000", "", "32768-65535 15001-29999"},
		{"what is left of many ephemeral ports", "1024 65000", "", "65001-65535"},
		{"what is reserved of all ports", "1024 65535", "30000-32767,50000-59999,7000,8000-8001", "50000-59999 8000-8001"},
		{"what is reserved beside the node ports", "1024 65535", "20000-32767", "20000-29999"},
		{"one single port", "1024 65535", "1500", "1500-1500"},
		{"none, where sockets get all", "1024 65535", "", ""},
		{"none, where only node ports are reserved", "1024 65535", "30000-32767", ""},
	} {
		t.Run("they are "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			mustSysctl(t, ns, "net/ipv4/ip_local_port_range", test.ephemeral)
			mustSysctl(t, ns, "net/ipv4/ip_local_reserved_ports", test.reserved)
			if got := mustMasqueradePorts(t, ns); got != test.want {
				t.Errorf("ports are %q, want %q", got, test.want)
			}
		})
	}
}

// The list of reserved ports is longer than a usual read.
func TestMasqueradePortsOfALongList(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	mustSysctl(t, ns, "net/ipv4/ip_local_port_range", "1024 65535")
	var list strings.Builder
	for port := 10001; port < 20000; port += 2 {
		list.WriteString(",")
		list.WriteString(PortRange{uint16(port), uint16(port)}.String())
	}
	mustSysctl(t, ns, "net/ipv4/ip_local_reserved_ports", list.String()[1:]+",40000-41000")
	if got := mustMasqueradePorts(t, ns); !strings.HasPrefix(got, "40000-41000 ") {
		t.Errorf("ports are %q, want the range at the end of the list", got)
	}
}

func mustSysctl(t *testing.T, ns *lab.Namespace, name, value string) {
	t.Helper()
	if err := ns.Sysctl(name, value); err != nil {
		t.Fatal(err)
	}
}

func mustMasqueradePorts(t *testing.T, ns *lab.Namespace) string {
	t.Helper()
	var got []string
	lab.MustDo(t, ns, func() error {
		ranges, err := MasqueradePorts()
		for _, ports := range ranges {
			got = append(got, ports.String())
		}

		return err
	})

	return strings.Join(got, " ")
}
