package load

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

func mustServeBulk(t *testing.T, ns *lab.Namespace) netip.AddrPort {
	t.Helper()
	server, err := ServeBulk(ns, 5201)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, server.Close()) })

	return netip.MustParseAddrPort("10.0.0.2:5201")
}

func TestBulk(t *testing.T) {
	p := mustPair(t)
	target := mustServeBulk(t, p.server)
	for range 2 { // one right after the other
		tcp, err := Bulk(t.Context(), p.client, nil, target, "--bytes", "10M")
		lab.Must(t, err)
		t.Logf("TCP: %+v", tcp)
		received := tcp.BitsPerSecond * tcp.Elapsed.Seconds() / 8
		// What is under way at the end is not counted.
		if received < 1e6 || received > 12e6 || tcp.PacketsPerSecond != 0 {
			t.Errorf("received %.0f bytes, %v packets/s, want a few million, and no packets counted", received, tcp.PacketsPerSecond)
		}

		udp, err := Bulk(t.Context(), p.client, nil, target, "--udp", "--bitrate", "0", "--length", "64", "--blockcount", "3000")
		lab.Must(t, err)
		t.Logf("UDP: %+v", udp)
		packets := udp.PacketsPerSecond * udp.Elapsed.Seconds()
		bits := udp.BitsPerSecond * udp.Elapsed.Seconds()
		// The first may be a datagram of the handshake.
		if packets < 1 || packets > 3001 {
			t.Errorf("received %v of 3000 packets", packets)
		}
		if bits < packets*63*8 || bits > packets*65*8 {
			t.Errorf("received %v packets with %v bits, want 64 bytes each", packets, bits)
		}
	}
}

func TestBulkReportsErrors(t *testing.T) {
	p := mustPair(t)
	_, err := Bulk(t.Context(), p.client, nil, netip.MustParseAddrPort("10.0.0.2:9"))
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("error is %v, want that it was refused", err)
	}
	if _, err := Bulk(t.Context(), p.client, nil, netip.MustParseAddrPort("10.0.0.2:9"), "--nonsense"); err == nil ||
		!strings.Contains(err.Error(), "nonsense") {
		t.Errorf("error is %v, want what iperf3 output", err)
	}
	server, err := ServeBulk(p.server, 5201)
	lab.Must(t, err)
	defer server.Close()
	if second, err := ServeBulk(p.server, 5201); err == nil {
		t.Error("no error from a port that is taken", second.Close())
	}
}

func TestReport(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       Throughput
		err        string
	}{
		{
			"TCP",
			`{"end": {"sum_sent": {"bytes": 300, "retransmits": 7}, "sum_received": {"seconds": 2, "bytes": 250, "bits_per_second": 1000}}}`,
			Throughput{BitsPerSecond: 1000, Elapsed: 2 * time.Second},
			"",
		},
		{
			"UDP",
			`{"end": {"sum_sent": {"bytes": 640}, "sum_received": {"seconds": 0.5, "bits_per_second": 512, "packets": 10, "lost_packets": 4}}}`,
			Throughput{BitsPerSecond: 512, PacketsPerSecond: 12, Elapsed: 500 * time.Millisecond},
			"",
		},
		{"an error", `{"start": {}, "end": {}, "error": "unable to connect"}`, Throughput{}, "iperf3: unable to connect"},
		{"a server that has no time", `{"error": "error - the server is busy running a test. try again later"}`, Throughput{}, "the server is busy"},
		{"a report without an end", `{"start": {}}`, Throughput{}, "no end"},
		{"no report", `usage:`, Throughput{}, "usage:"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseReport([]byte(test.text))
			if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("%+v, %v, want %+v, %q", got, err, test.want, test.err)
			}
		})
	}
}
