package main

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Suspects are counted at the addresses that lead to them, and have their reason and their pause
// beside their endpoint; a limit of healing is shown as well.
func TestDrawSuspects(t *testing.T) {
	addr := netip.MustParseAddrPort
	suspect := &status.Suspect{Reason: "does not answer", Until: time.Now().Add(2900 * time.Millisecond)}
	svc := status.Service{Name: "default/web", Ports: []status.ServicePort{{
		Name: "default/web:http", Protocol: lb.TCP,
		Frontends: []status.Frontend{
			{Address: addr("10.96.0.1:80"), Protocol: lb.TCP, Scope: lb.Internal, Kind: lb.KindClusterIP, Algorithm: "random", Backends: []netip.AddrPort{addr("10.0.0.1:80"), addr("10.0.0.2:80")}},
			{Address: addr("10.96.0.2:80"), Protocol: lb.TCP, Scope: lb.Internal, Kind: lb.KindExternalIP, Algorithm: "random", Healing: "off", Backends: []netip.AddrPort{addr("10.0.0.2:80")}},
		},
		Backends: []status.Backend{
			{Service: "default/web:http", Protocol: lb.TCP, Address: addr("10.0.0.1:80"), Active: true, Suspect: suspect},
			{Service: "default/web:http", Protocol: lb.TCP, Address: addr("10.0.0.2:80"), Active: true},
			{Service: "default/web:http", Protocol: lb.TCP, Address: addr("10.0.0.3:80"), Reason: "not ready", Suspect: suspect},
		},
	}}}
	var text bytes.Buffer
	out := newOutput()
	if err := out.print(&text, svc, func(t *table) { drawService(t, svc) }); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"2 (1 suspect)", "1 (healing: off)", "suspect: does not answer; passed over for 3s", "inactive: not ready",
	} {
		if n := strings.Count(text.String(), want); n != 1 {
			t.Errorf("%q is there %d times:\n%s", want, n, text.String())
		}
	}
	over := *suspect
	over.Until = time.Now().Add(-time.Second)
	if got, want := over.String(), "suspect: does not answer; the next connection is a probe"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
