package lab

import "testing"

func TestNetfilterCounts(t *testing.T) {
	p := mustPair(t)
	err := p.ns.Netfilter(`
		table inet test {
			counter asked {}
			counter other {}
			chain input {
				type filter hook input priority filter
				udp dport 8080 counter name asked
				udp dport 9 counter name other drop
			}
		}`)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := p.caller.Request("udp", "127.0.0.1:8080"); err != nil {
			t.Fatal(err)
		}
	}
	counters, err := p.ns.NetfilterCounters()
	if err != nil || len(counters) != 2 || counters["asked"] != 3 || counters["other"] != 0 {
		t.Errorf("counters are %v, %v, want 3 asked, 0 other", counters, err)
	}
}

func TestNetfilterRefusesNonsense(t *testing.T) {
	if err := MustNamespace(t, "nonsense").Netfilter("table"); err == nil {
		t.Error("no error from half a word")
	}
}
