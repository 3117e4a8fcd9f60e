package bpf

import (
	"cmp"
	"fmt"
	"net/netip"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// mustProbe loads the probe of a place's ingress program.
func (w *world) mustProbe(t testing.TB, p place) *Probe {
	t.Helper()
	probe, err := LoadDeviceProbe(w.maps, w.programs(t, p).Ingress)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, probe.Close()) })

	return probe
}

// mustArrive asks a probe about a packet to the given backend, or to the one that is picked.
func (w *world) mustArrive(t testing.TB, probe *Probe, p place, in packet, backend uint32) Answer {
	t.Helper()
	var answer Answer
	lab.Must(t, w.node.Do(func() (err error) {
		answer, err = probe.Arrive(Packet{
			Device: int(w.index(p.device)), MAC: w.links[p.device].Attrs().HardwareAddr,
			From: w.family.addrPort(in.src), To: w.family.addrPort(in.dst), Protocol: uint8(in.proto), Backend: backend,
		})

		return err
	}))

	return answer
}

// contents are the entries of the maps that programs write.
func (w *world) contents(t testing.TB) map[string]any {
	t.Helper()
	counts, err := w.maps.ReasonCounts()
	lab.Must(t, err)
	flows, err := w.maps.FlowCounts()
	lab.Must(t, err)
	all := map[string]any{"reasons": counts, "flow counts": flows}
	for name, m := range w.maps.Replacements() {
		switch name {
		case "sl_affinity", "sl_claims", "sl_turns", "sl_flows", "sl_half_open", "sl_unanswered", "sl_refusals", "sl_icmp_budgets", "sl_fragments", "sl_udp_pins":
			entries := map[string]string{}
			var key, value []byte
			it := m.Iterate()
			for it.Next(&key, &value) {
				entries[string(key)] = string(value)
			}
			lab.Must(t, it.Err())
			all[name] = entries
		case "sl_source_filter", "sl_port_filter", "sl_flow_usage":
			var lines []string
			for i := range m.MaxEntries() {
				line, err := m.LookupBytes(i)
				lab.Must(t, err)
				lines = append(lines, string(line))
			}
			all[name] = lines
		}
	}

	return all
}

// probed are places that differ in what a probe tells.
var probed = []place{turning, bridgedNIC, podVeth}

// A probe gives the answer that the programs then act upon, and changes no map.
func TestProbeIsRight(t *testing.T) {
	const pods = maps.DevicePods
	tests := []struct {
		name string
		s    service
		from string // another client than that of the place
		to   string
		want map[uint32]maps.Reason // by class, if it depends on that; else by pods
	}{
		{"a local backend", service{at: []string{clusterIP}, to: []string{tapPod}}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"a remote backend", service{at: []string{clusterIP}, to: []string{remotePod}}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"a route with another source", service{at: []string{clusterIP}, to: []string{farPod}}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"masquerade of all", service{at: []string{clusterIP}, to: []string{remotePod}, flags: maps.PoolMasquerade}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"no way to the backend", service{at: []string{clusterIP}, to: []string{nowhere}}, "", clusterIP,
			map[uint32]maps.Reason{pods: maps.ReasonTranslated, maps.DeviceUplink: maps.ReasonDropMasqueradeAddr}},
		{"a node port", service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{portPod}}, "", "8.0.50.1:30080", map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"a port of the node itself", service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{portPod}}, "", "8.0.50.1:22", map[uint32]maps.Reason{pods: maps.ReasonPassNoFrontend}},
		{"no backend", service{at: []string{clusterIP}}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonRejectNoBackend}},
		{"no local backend", service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, outside: []string{}, flags: maps.PoolDropIfEmpty}, "", balancer,
			map[uint32]maps.Reason{pods: maps.ReasonTranslated, maps.DeviceUplink: maps.ReasonDropNoLocalBackend}},
		{"another port of a ClusterIP", service{at: []string{clusterIP}, to: []string{tapPod}}, "", "8.0.96.1:81", map[uint32]maps.Reason{pods: maps.ReasonRejectNoPort}},
		{"outside of the source ranges", service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, flags: maps.PoolSourceRanges, ranges: []string{"8.0.99.0/24"}}, "", balancer,
			map[uint32]maps.Reason{pods: maps.ReasonDropSourceRange}},
		{"inside of the source ranges", service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, flags: maps.PoolSourceRanges, ranges: []string{"8.0.0.0/16"}}, "", balancer,
			map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"no Service", service{at: []string{clusterIP}, to: []string{tapPod}}, "", otherServer, map[uint32]maps.Reason{pods: maps.ReasonPassNoFrontend}},
		{"a hairpin", service{at: []string{clusterIP}, to: []string{tapPod}}, "8.0.4.2:40000", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"affinity", service{at: []string{clusterIP}, to: []string{tapPod, portPod}, affinity: 600}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
		{"round robin", service{at: []string{clusterIP}, to: []string{tapPod, portPod}, algorithm: maps.AlgorithmRR}, "", clusterIP, map[uint32]maps.Reason{pods: maps.ReasonTranslated}},
	}
	each(t, probed, func(t *testing.T, w *world, p place) {
		probe := w.mustProbe(t, p)
		if probe.IsOfPods() != (p.class == pods) {
			t.Errorf("the probe is of pods: %t, and the place is %s", probe.IsOfPods(), p)
		}
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				w := newWorldAt(t, p, w.family)
				w.lenient = true // refusals
				w.serve(t, test.s)
				in := tcp(cmp.Or(test.from, p.client), test.to, "S")
				before := w.contents(t)
				answer := w.mustArrive(t, probe, p, in, 0)
				w.mustHave(t, before)
				want, ofClass := test.want[p.class]
				if !ofClass {
					want = test.want[pods]
				}
				o := w.ingress(t, p, in)
				if passes := want == maps.ReasonPassNoFrontend; answer.Reason != want || !passes && o.reasons[want] == 0 {
					t.Errorf("the probe's reason is %q, want %q, and the program counted %v", answer.Reason, want, o.reasons)
				}
				if want != maps.ReasonTranslated {
					return
				}
				f := w.flowOf(t, in.src.String(), in.dst.String())
				answer = w.mustArrive(t, probe, p, in, f.BackendId)
				masquerade := netip.Addr{}
				if f.Flags&maps.FlowMasqueraded != 0 {
					masquerade = f.Masquerade.IP()
				}
				if answer.Masquerade != masquerade || answer.Turns != 0 != (f.Flags&maps.FlowTurned != 0) {
					t.Errorf("the probe has masquerade %s, turns to device %d; the flow has %s, flags %#x", answer.Masquerade, answer.Turns, masquerade, f.Flags)
				}
			})
		}
	})
}

// mustHave fails unless the maps that programs write have these contents.
func (w *world) mustHave(t testing.TB, want map[string]any) {
	t.Helper()
	if diff := gocmp.Diff(want, w.contents(t), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("maps were changed (-before +after):\n%s", diff)
	}
}

// A client with affinity keeps its backend, for the time that the probe tells.
func TestProbeOfAffinity(t *testing.T) {
	each(t, probed, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod, portPod}, affinity: 600})
		w.remember(t, s, p.client, portPod, now(t)-uint64(100*time.Second))
		answer := w.mustArrive(t, w.mustProbe(t, p), p, tcp(p.client, clusterIP, "S"), 0)
		if answer.Backend != s.backends[portPod] || answer.Affinity.Round(10*time.Second) != 500*time.Second {
			t.Errorf("backend %d for %v, want %d for 500 s", answer.Backend, answer.Affinity, s.backends[portPod])
		}
	})
}

// The probe of sockets has the configuration of the socket program at hand.
func TestProbeOfSockets(t *testing.T) {
	f := ipv4
	w := newWorld(t, f)
	w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod}})
	w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{tapPod}})
	w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{portPod}})
	w.serve(t, service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, flags: maps.PoolSourceRanges | maps.PoolNodeInRanges, ranges: []string{"8.0.4.0/24"}})
	w.serve(t, service{at: []string{"8.0.96.9:80"}, to: []string{tapPod}, flags: maps.PoolOptedOut})
	const uid = "11111111-2222-3333-4444-555555555555"
	pod, _ := maps.PodUIDOf(uid)
	lab.Must(t, w.maps.OptedOut.Put(pod, 1))
	t.Cleanup(func() { lab.Must(t, w.maps.OptedOut.Delete(pod)) })

	probes := map[Config]*Probe{}
	tapClient, stranger := netip.MustParseAddr("8.0.4.3"), netip.MustParseAddr("8.0.100.2")
	for _, test := range []struct {
		name string
		cfg  Config
		dial Dial
		want maps.Reason
	}{
		{"a backend", Config{}, Dial{To: at(clusterIP), Source: tapClient}, maps.ReasonTranslated},
		{"an unused port", Config{}, Dial{To: at("8.0.96.1:81"), Source: tapClient}, maps.ReasonRejectNoPort},
		{"UDP is left alone", Config{UDP: UDPOff}, Dial{To: at(clusterIP), Protocol: 17, Source: tapClient}, maps.ReasonPassDisabled},
		{"UDP of the node is not", Config{UDP: UDPOff}, Dial{To: at(clusterIP), Protocol: 17, Host: true}, maps.ReasonTranslated},
		{"UDP is translated", Config{UDP: UDPAll}, Dial{To: at(clusterIP), Protocol: 17, Source: tapClient}, maps.ReasonTranslated},
		{"SCTP is not", Config{}, Dial{To: at(clusterIP), Protocol: 132, Source: tapClient}, maps.ReasonPassProtocol},
		{"a node port of localhost", Config{}, Dial{To: at("127.0.0.1:30080"), Host: true}, maps.ReasonTranslated},
		{"not in a pod", Config{}, Dial{To: at("127.0.0.1:30080"), Source: tapClient}, maps.ReasonPassNoFrontend},
		{"the node is in the ranges", Config{}, Dial{To: at(balancer), Host: true}, maps.ReasonTranslated},
		{"a pod is in the ranges", Config{}, Dial{To: at(balancer), Source: tapClient}, maps.ReasonTranslated},
		{"another is not", Config{}, Dial{To: at(balancer), Source: stranger}, maps.ReasonDropSourceRange},
		{"the Service has opted out", Config{}, Dial{To: at("8.0.96.9:80"), Source: tapClient}, maps.ReasonPassDisabled},
		{"but not for the node", Config{}, Dial{To: at("8.0.96.9:80"), Host: true}, maps.ReasonTranslated},
		{"the pod has opted out", Config{PodOptOut: true}, Dial{To: at(clusterIP), Source: tapClient, PodUID: uid}, maps.ReasonPassDisabled},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := test.cfg
			cfg.SetRetval = true
			probe := probes[cfg]
			if probe == nil {
				attached, err := Load(w.maps, cfg)
				lab.Must(t, err)
				defer attached.Close()
				probe, err = LoadSocketProbe(w.maps, attached.Sock[0].Program)
				lab.Must(t, err)
				probes[cfg] = probe
			}
			if test.dial.Protocol == 0 {
				test.dial.Protocol = 6
			}
			before := w.contents(t)
			var answer Answer
			lab.Must(t, w.node.Do(func() (err error) {
				answer, err = probe.Dial(test.dial)

				return err
			}))
			if answer.Reason != test.want {
				t.Errorf("the reason is %q, want %q", answer.Reason, test.want)
			}
			w.mustHave(t, before)
		})
	}
	for _, probe := range probes {
		lab.Must(t, probe.Close())
	}
}

// Node ports answer on the loopback address of each family, or do not.
func TestProbeOfLocalhost(t *testing.T) {
	eachFamily(t, func(t *testing.T, f family) {
		w := newWorld(t, f)
		w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{portPod}})
		loopback := map[family]string{ipv4: "127.0.0.1:30080", ipv6: "[::1]:30080"}[f]
		for _, off := range []Config{
			{}, {NoLocalhostNodePortsV4: true}, {NoLocalhostNodePortsV6: true}, {NoLocalhostNodePortsV4: true, NoLocalhostNodePortsV6: true},
		} {
			want := maps.ReasonTranslated
			if f == ipv4 && off.NoLocalhostNodePortsV4 || f == ipv6 && off.NoLocalhostNodePortsV6 {
				want = maps.ReasonPassNoFrontend
			}
			cfg := off
			cfg.SetRetval = true
			attached, err := Load(w.maps, cfg)
			lab.Must(t, err)
			probe, err := LoadSocketProbe(w.maps, attached.Sock[0].Program)
			lab.Must(t, err)
			lab.Must(t, w.node.Do(func() error {
				answer, err := probe.Dial(Dial{To: at(loopback), Protocol: 6, Host: true})
				if err == nil && answer.Reason != want {
					t.Errorf("off for IPv4 %t, for IPv6 %t: the reason is %q, want %q", off.NoLocalhostNodePortsV4, off.NoLocalhostNodePortsV6, answer.Reason, want)
				}

				return err
			}))
			lab.Must(t, probe.Close())
			lab.Must(t, attached.Close())
		}
	})
}

// A probe passes over suspects as the programs do, and leaves their health as it is.
func TestProbeOfSuspects(t *testing.T) {
	if !knowsTracing(t) {
		t.Skip("this kernel does not trace sockets (Linux 5.11)")
	}
	w := newWorld(t, ipv4)
	attached, err := Load(w.maps, Config{SetRetval: true, Heal: true})
	lab.Must(t, err)
	defer attached.Close()
	probe, err := LoadSocketProbe(w.maps, attached.Sock[0].Program)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, probe.Close()) })

	for _, algorithm := range []uint8{maps.AlgorithmRandom, maps.AlgorithmRR, maps.AlgorithmLC} {
		for _, test := range []struct {
			name     string
			suspects []string
			pause    time.Duration
			picked   bool
		}{
			{"in its pause", []string{portPod}, time.Minute, false},
			{"after its pause", []string{portPod}, -time.Second, true},
			{"of too many", []string{portPod, remotePod}, time.Minute, true},
		} {
			t.Run(fmt.Sprintf("algorithm %d, a suspect %s", algorithm, test.name), func(t *testing.T) {
				s := w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod, portPod, remotePod}, algorithm: algorithm})
				health := map[uint32]maps.BackendHealth{}
				for _, suspect := range test.suspects {
					id := s.backends[suspect]
					health[id] = maps.BackendHealth{Id: id, Suspected: now(t), Until: now(t) + uint64(test.pause)}
					lab.Must(t, w.maps.Health.Put(maps.Index(id), health[id]))
					t.Cleanup(func() { lab.Must(t, w.maps.Health.Put(maps.Index(id), maps.BackendHealth{})) })
				}
				before, picked := w.contents(t), false
				for range 100 {
					var answer Answer
					lab.Must(t, w.node.Do(func() (err error) {
						answer, err = probe.Dial(Dial{To: at(clusterIP), Protocol: 6, Host: true})

						return err
					}))
					picked = picked || answer.Backend == s.backends[portPod]
				}
				if picked != test.picked {
					t.Errorf("it is picked: %t", picked)
				}
				w.mustHave(t, before)
				for id, want := range health {
					if got, _ := w.maps.HealthOf(id); got != want {
						t.Errorf("the health of backend %d was %+v, and is %+v", id, want, got)
					}
				}
			})
		}
	}
}
