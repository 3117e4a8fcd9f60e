package load

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Those that wait for an answer delay no others, and that there are thousands of them does not
// stop the process.
func TestDialsWaitForNoOther(t *testing.T) {
	p := mustPair(t)
	lab.MustServe(t, p.server, "server", "10.0.0.2:8080")
	lab.Must(t, p.server.Netfilter(`table ip t {
		chain c {
			type filter hook prerouting priority raw;
			tcp flags syn numgen inc mod 2 == 0 drop
			meta l4proto udp numgen inc mod 2 == 0 drop
		}
	}`))
	for _, network := range []string{"tcp", "udp"} {
		t.Run(network, func(t *testing.T) {
			d := Dials{Network: network, Target: targets("10.0.0.2")[0], Rate: 2000, Duration: 2 * time.Second, Timeout: 800 * time.Millisecond}
			ctx, cancel := context.WithTimeout(t.Context(), lab.Timeout)
			defer cancel()
			dials, err := d.Run(ctx, p.client, nil)
			lab.Must(t, err)
			if len(dials) != 4000 {
				t.Errorf("%d dials, want 4000", len(dials))
			}
			failed := 0
			for _, d := range dials {
				switch {
				case d.Failed != "":
					failed++
					if d.Took < 700*time.Millisecond {
						t.Errorf("failed before its time: %+v", d)
					}
				case d.Backend != netip.MustParseAddr("10.0.0.2") || d.Took > 700*time.Millisecond:
					t.Errorf("not what a server answers at once: %+v", d)
				}
			}
			if failed != 2000 {
				t.Errorf("%d failed, want each second one", failed)
			}
		})
	}
}

// A datagram that is lost is sent again by the same socket.
func TestDialsRepeatDatagrams(t *testing.T) {
	p := mustPair(t)
	lab.MustServe(t, p.server, "server", "udp/10.0.0.2:8080")
	lab.Must(t, p.server.Netfilter(`table ip t {
		set seen { type inet_service; flags dynamic; }
		chain c {
			type filter hook prerouting priority raw;
			udp sport != @seen add @seen { udp sport } drop
		}
	}`))
	d := Dials{Network: "udp", Target: targets("10.0.0.2")[0], Rate: 10, Duration: time.Second, Timeout: 3 * time.Second}
	dials, err := d.Run(t.Context(), p.client, nil)
	lab.Must(t, err)
	for _, d := range dials {
		if d.Failed != "" || d.Took < repeatAfter || d.Took > 2*repeatAfter {
			t.Errorf("not answered at its second try: %+v", d)
		}
	}
}

// The sources are used.
func TestDialsFromSources(t *testing.T) {
	p := mustPair(t)
	lab.MustServe(t, p.server, "server", "10.0.0.2:8080")
	d := Dials{Network: "tcp", Target: targets("10.0.0.2")[0], Rate: 20, Duration: time.Second, Sources: mustOwnSources(t, p)}
	dials, err := d.Run(t.Context(), p.client, nil)
	lab.Must(t, err)
	for _, d := range dials {
		if d.Failed != "" {
			t.Errorf("failed: %+v", d)
		}
	}
	checkSources(t, p.client, true)
}

func TestDialsRefuse(t *testing.T) {
	for name, d := range map[string]Dials{
		"no rate":              {Network: "tcp", Target: targets("10.0.0.2")[0], Duration: time.Second},
		"another network":      {Network: "sctp", Target: targets("10.0.0.2")[0], Duration: time.Second, Rate: 1},
		"udp without an end":   {Network: "udp", Target: targets("10.0.0.2")[0], Duration: time.Second, Rate: 1},
		"no target to dial to": {Network: "tcp", Duration: time.Second, Rate: 1},
	} {
		if _, err := d.Run(t.Context(), nil, nil); err == nil {
			t.Errorf("no error with %s", name)
		}
	}
}
