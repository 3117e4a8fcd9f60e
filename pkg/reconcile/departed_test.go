package reconcile

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// An endpoint that comes back is the same backend: what counts for its id (connections, health, clients that
// stay with it) is its own. One that was away for long, and has no connections, is another.
func TestBackendComesBack(t *testing.T) {
	for _, form := range []struct {
		name, frontend, goes, stays string
		load                        func(live int32) maps.BackendLoad // of connections that began at sockets, or at devices
	}{
		{"TCP", "10.96.0.10:80 ->", "10.0.1.7:8080", "10.0.2.7:8080", ofSockets},
		{"UDP", "10.96.0.10:80/UDP ->", "10.0.1.7:8080", "10.0.2.7:8080", ofSockets},
		{"TCP over IPv6", "[fd00:96::10]:80 ->", "[fd00::1:7]:8080", "[fd00::2:7]:8080", ofSockets},
		{"UDP over IPv6, from outside", "[fd00:96::10]:80/UDP external LoadBalancer ->", "[fd00::1:7]:8080", "[fd00::2:7]:8080", ofDevices},
		{"SCTP, by a node port", "0.0.0.0:30080/SCTP NodePort ->", "10.0.1.7:8080", "10.0.2.7:8080", ofDevices},
		{"TCP over IPv6, by a node port", "[::]:30080 external NodePort ->", "[fd00::1:7]:8080", "[fd00::2:7]:8080", ofDevices},
	} {
		t.Run(form.name, func(t *testing.T) {
			both, one := form.frontend+" "+form.goes+" "+form.stays, form.frontend+" "+form.stays
			testBackendComesBack(t, form.frontend, both, one, netip.MustParseAddrPort(form.goes), form.load)
		})
	}
}

func ofSockets(live int32) maps.BackendLoad { return maps.BackendLoad{Sockets: live} }

func ofDevices(live int32) maps.BackendLoad { return maps.BackendLoad{Flows: live} }

func testBackendComesBack(t *testing.T, none, both, one string, goes netip.AddrPort, load func(live int32) maps.BackendLoad) {
	t.Helper()
	type step = []string
	for _, test := range []struct {
		name string
		live int32 // connections that live meanwhile
		away []step
		same bool
	}{
		{"at once", 0, []step{{"want", one}, {"want", both}}, true},
		{"after three seconds", 0, []step{{"want", one}, {"wait 3s"}, {"want", both}}, true},
		{"after three seconds, with connections", 100, []step{{"want", one}, {"wait 3s"}, {"want", both}}, true},
		{"after three seconds as the only one", 100, []step{{"want", none}, {"wait 3s"}, {"want", both}}, true},
		{"several times", 100, []step{{"want", one}, {"wait 3s"}, {"want", both}, {"want", one}, {"wait 3s"}, {"want", both}}, true},
		{"after an hour", 0, []step{{"want", one}, {"wait 1s"}, {"wait 1h"}, {"want", both}}, false},
		{"after an hour, with connections", 1, []step{{"want", one}, {"wait 1s"}, {"wait 1h"}, {"want", both}}, true},
		{"after a restart", 0, []step{{"want", one}, {"wait 3s"}, {"restart"}, {"want", both}}, true},
		{"after a restart, with connections", 100, []step{{"want", one}, {"wait 3s"}, {"restart"}, {"want", both}}, true},
		{"a while after a restart", 100, []step{{"want", one}, {"wait 3s"}, {"restart"}, {"want", one}, {"wait 3s"}, {"want", both}}, true},
		{"after two restarts", 100, []step{{"want", one}, {"wait 3s"}, {"restart"}, {"want", one}, {"wait 3s"}, {"restart"}, {"want", both}}, true},
		{"after an upgrade", 100, []step{{"want", one}, {"wait 3s"}, {"upgrade"}, {"want", one}, {"wait 3s"}, {"want", both}}, true},
		{"an hour after a restart", 0, []step{{"want", one}, {"wait 3s"}, {"restart"}, {"want", one}, {"wait 1s"}, {"wait 1h"}, {"want", both}}, false},
		{"after an hour, and a restart meanwhile, with connections", 1, []step{
			{"want", one}, {"wait 3s"}, {"restart"}, {"want", one}, {"wait 1s"}, {"wait 1h"}, {"want", both},
		}, true},
		{"as a backend of another Service", 100, []step{{"want", "service default/other\n" + both}, {"wait 3s"}}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			create := func() maps.Tables { return fakeTables(t, defaultCapacities) }
			s := &script{t: t, tables: create(), create: create, clock: newTestClock()}
			s.restart()
			backend := func() (uint32, maps.Backend) {
				t.Helper()
				for place, b := range s.tables.Backends.All() {
					if b.Id != 0 && b.AddrPort() == goes {
						return place, b
					}
				}
				t.Fatal("it is not in the maps")

				return 0, maps.Backend{}
			}
			s.step("want", both)
			place, before := backend()
			if err := s.tables.Loads.Put(place, load(test.live)); err != nil {
				t.Fatal(err)
			}
			for _, step := range test.away {
				s.step(step[0], append(step, "")[1])
			}
			s.step("wait 1s", "")
			_, after := backend()
			if same := after.Id == before.Id; same != test.same {
				t.Errorf("backend %d after %d, the same: %t, want %t", after.Id, before.Id, same, test.same)
			}
			if s.say("drift") != "" {
				t.Errorf("drift: %s", s.say("drift"))
			}
		})
	}
}
