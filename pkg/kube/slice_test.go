package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Addresses that are no endpoints of a family.
var (
	special4 = []string{"127.0.0.1", "127.255.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "239.255.255.250", "255.255.255.255"}
	special6 = []string{
		"::1", "::", "fe80::1", "febf:ffff::1", "ff01::1", "ff02::1", "ff05::2", "ff0e::101",
		"::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.1.7", "fe80::1%eth0",
	}
)

// addEndpoints adds endpoints in front of those of a slice.
func addEndpoints(s *discoveryv1.EndpointSlice, addresses ...string) {
	for _, address := range slices.Backward(addresses) {
		s.Endpoints = slices.Insert(s.Endpoints, 0, discoveryv1.Endpoint{Addresses: []string{address}})
	}
}

// fieldsOf are the fields of such endpoints.
func fieldsOf(addresses []string) (fields []string) {
	for i := range addresses {
		fields = append(fields, fmt.Sprintf("endpoints[%d].addresses[0]", i))
	}

	return fields
}

// Each row is an EndpointSlice that differs from a valid one in one field.
var sliceTests = []struct {
	name     string
	edit     func(*discoveryv1.EndpointSlice)
	want     func(*Slice)
	problems []string // fields
}{
	{
		"as it was",
		func(*discoveryv1.EndpointSlice) {},
		func(*Slice) {}, nil,
	}, {
		"of an endpoint that says all there is to say",
		func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0] = discoveryv1.Endpoint{
				Addresses:  []string{"10.0.1.7", "10.0.1.8"},
				NodeName:   ptr.To("node1"),
				Zone:       ptr.To("z1"),
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(false), Terminating: ptr.To(true)},
				Hints: &discoveryv1.EndpointHints{
					ForZones: []discoveryv1.ForZone{{Name: "z1"}, {Name: "z2"}},
					ForNodes: []discoveryv1.ForNode{{Name: "node1"}},
				},
			}
		},
		func(s *Slice) {
			s.Endpoints[0] = lb.Endpoint{
				Addr: netip.MustParseAddr("10.0.1.7"), Terminating: true,
				Place: unique.Make(lb.Place{NodeName: "node1", Zone: "z1", ForZones: lb.NamesOf("z1", "z2"), ForNodes: lb.NamesOf("node1")}),
			}
		}, nil,
	}, {
		"of IPv6",
		func(s *discoveryv1.EndpointSlice) {
			s.AddressType, s.Endpoints[0].Addresses = discoveryv1.AddressTypeIPv6, []string{"FD00::0007"}
		},
		func(s *Slice) { s.Family, s.Endpoints[0].Addr = lb.IPv6, netip.MustParseAddr("fd00::7") }, nil,
	}, {
		"with leading zeros in an address",
		func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses = []string{"10.0.001.007"} },
		func(*Slice) {}, nil,
	}, {
		"of names instead of addresses",
		func(s *discoveryv1.EndpointSlice) { s.AddressType = discoveryv1.AddressTypeFQDN },
		nil, []string{"addressType"},
	}, {
		"of no Service",
		func(s *discoveryv1.EndpointSlice) { s.Labels = nil },
		nil, []string{"metadata.labels"},
	}, {
		"of a Service without a name",
		func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "" },
		nil, []string{"metadata.labels"},
	}, {
		"without ports",
		func(s *discoveryv1.EndpointSlice) { s.Ports = nil },
		func(s *Slice) { s.Ports = nil }, nil,
	}, {
		"with a port for each mistake",
		func(s *discoveryv1.EndpointSlice) {
			s.Ports = append([]discoveryv1.EndpointPort{
				{Port: ptr.To(int32(1))},
				{Name: ptr.To("a")},
				{Name: ptr.To("a"), Port: ptr.To(int32(0))},
				{Name: ptr.To("a"), Port: ptr.To(int32(1 << 16))},
				{Name: ptr.To("a"), Port: ptr.To(int32(1)), Protocol: ptr.To(corev1.Protocol("QUIC"))},
			}, s.Ports...)
		},
		func(*Slice) {},
		[]string{"ports[0].name", "ports[1].port", "ports[2].port", "ports[3].port", "ports[4].protocol"},
	}, {
		"with an endpoint for each mistake",
		func(s *discoveryv1.EndpointSlice) {
			s.Endpoints = append([]discoveryv1.Endpoint{
				{},
				{Addresses: []string{"web.example.org"}},
				{Addresses: []string{""}},
				{Addresses: []string{"fd00::7"}},
			}, s.Endpoints...)
		},
		func(*Slice) {},
		[]string{"endpoints[0].addresses", "endpoints[1].addresses[0]", "endpoints[2].addresses[0]", "endpoints[3].addresses[0]"},
	}, {
		"with endpoints that are another destination for each client",
		func(s *discoveryv1.EndpointSlice) { addEndpoints(s, special4...) },
		func(*Slice) {},
		fieldsOf(special4),
	}, {
		"of IPv6 with endpoints that are another destination for each client",
		func(s *discoveryv1.EndpointSlice) {
			s.AddressType, s.Endpoints[0].Addresses = discoveryv1.AddressTypeIPv6, []string{"fd00::7"}
			addEndpoints(s, special6...)
		},
		func(s *Slice) { s.Family, s.Endpoints[0].Addr = lb.IPv6, netip.MustParseAddr("fd00::7") },
		fieldsOf(special6),
	}, {
		"with names that a terminal would obey",
		func(s *discoveryv1.EndpointSlice) {
			s.Endpoints = []discoveryv1.Endpoint{{
				Addresses: []string{"10.0.1.7"}, Zone: ptr.To("z1\x1b[2J"), NodeName: ptr.To("node1\u009b2J"),
				Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1\nz2"}}, ForNodes: []discoveryv1.ForNode{{Name: "\a"}}},
			}}
		},
		func(s *Slice) {
			s.Endpoints = []lb.Endpoint{{Addr: netip.MustParseAddr("10.0.1.7"), Place: unique.Make(lb.Place{ForZones: "\n", ForNodes: "\n"}), Ready: true, Serving: true}}
		},
		[]string{"endpoints[0].nodeName", "endpoints[0].zone", "endpoints[0].hints.forZones", "endpoints[0].hints.forNodes"},
	}, {
		"of a change at a known time",
		func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05.6Z"}
		},
		func(s *Slice) { s.Triggered = time.Date(2026, 1, 2, 3, 4, 5, 600e6, time.UTC) }, nil,
	}, {
		"of a change at no time",
		func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "yesterday"}
		},
		func(*Slice) {}, nil,
	},
}

func TestTranslateSlice(t *testing.T) {
	for _, test := range sliceTests {
		t.Run(test.name, func(t *testing.T) {
			obj := slice("web-1", "web", "10.0.1.7")
			want := Slice{EndpointSlice: lb.EndpointSlice{
				Name:      lb.SliceName{Namespace: "default", Name: "web-1"},
				Service:   lb.ServiceName{Namespace: "default", Name: "web"},
				Family:    lb.IPv4,
				Ports:     []lb.EndpointPort{{Protocol: lb.TCP, Port: 8080}},
				Endpoints: []lb.Endpoint{{Addr: netip.MustParseAddr("10.0.1.7"), Place: unique.Make(lb.Place{}), Ready: true, Serving: true}},
			}}
			test.edit(obj)
			got, problems, counts := translateSlice(keyOf(kindSlice, &obj.ObjectMeta), obj)
			if counts != (test.want != nil) {
				t.Fatalf("it counts: %v", counts)
			}
			if test.want != nil {
				test.want(&want)
				if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
			mustBlame(t, "EndpointSlice default/web-1", problems, test.problems)
		})
	}
}
