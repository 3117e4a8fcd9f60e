package agent

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

// A change may bring several Services with the same address: the one that gets it is told, as for a Service that is there.
func TestTwoNewServicesWithOneAddress(t *testing.T) {
	p := mustRunLoopOn(t, maps.NewFakes(100), 0, realLimits)
	tried, err := p.try(t.Context(), []byte(`
{apiVersion: v1, kind: Service, metadata: {namespace: a, name: one}, spec: {clusterIP: 10.96.0.7, ports: [{port: 80}], externalIPs: [192.0.2.7]}}
---
{apiVersion: v1, kind: Service, metadata: {namespace: b, name: two}, spec: {clusterIP: 192.0.2.7, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {namespace: c, name: three}, spec: {clusterIP: 10.96.0.8, ports: [{port: 80}], externalIPs: [192.0.2.7, 192.0.2.8]}}
`), false)
	lab.Must(t, err)
	for addr, want := range map[string]string{"10.96.0.7": "a/one", "192.0.2.7": "b/two", "192.0.2.8": "c/three"} {
		key := lb.FrontendKey{Addr: netip.MustParseAddr(addr), Port: 80, Protocol: lb.TCP, Scope: lb.Internal}
		if owner := tried.Owners[key]; owner.Service.String() != want || owner.Yields {
			t.Errorf("%s would be %s's (%t), want %s", addr, owner.Service, owner.Yields, want)
		}
	}
}
