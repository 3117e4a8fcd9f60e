package kube

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// compareAddrs lets go-cmp compare types without exported fields.
var compareAddrs = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Transformer("place", func(p unique.Handle[lb.Place]) lb.Place { return p.Value() }),
}

func TestTranslateService(t *testing.T) {
	want := lb.Service{
		Name:        lb.ServiceName{Namespace: "prod", Name: "web"},
		Created:     time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Type:        lb.LoadBalancer,
		ClusterIPs:  []netip.Addr{netip.MustParseAddr("10.96.0.41"), netip.MustParseAddr("fd00::1")},
		Families:    []lb.Family{lb.IPv4, lb.IPv6},
		ExternalIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		LoadBalancers: []lb.LoadBalancerIP{
			{Addr: netip.MustParseAddr("203.0.113.1")},
			{Addr: netip.MustParseAddr("203.0.113.2")},
			{Addr: netip.MustParseAddr("203.0.113.3"), Proxy: true},
			{Addr: netip.MustParseAddr("203.0.113.4"), Proxy: true},
			{},
		},
		SourceRanges:        []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		InternalPolicy:      lb.Local,
		ExternalPolicy:      lb.Local,
		Affinity:            time.Minute,
		Algorithm:           lb.Maglev,
		HealthCheckNodePort: 32000,
		Ports: []lb.ServicePort{
			{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: lb.UDP, Port: 53},
			{Name: "sig", Protocol: lb.SCTP, Port: 65535},
		},
	}
	got, problems := translateService(fullService())
	if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
}

// fullService sets every field that is read.
func fullService() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "prod", Name: "web", CreationTimestamp: metav1.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
			Annotations: map[string]string{"sluice-lb.io/algorithm": "maglev"},
		},
		Spec: corev1.ServiceSpec{
			Type:                     corev1.ServiceTypeLoadBalancer,
			ClusterIP:                "10.96.0.041",
			ClusterIPs:               []string{"10.96.0.041", "fd00::1"},
			IPFamilies:               []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			ExternalIPs:              []string{"192.0.2.1"},
			LoadBalancerSourceRanges: []string{" 198.51.100.7/24 "},
			InternalTrafficPolicy:    ptr.To(corev1.ServiceInternalTrafficPolicyLocal),
			ExternalTrafficPolicy:    corev1.ServiceExternalTrafficPolicyLocal,
			SessionAffinity:          corev1.ServiceAffinityClientIP,
			SessionAffinityConfig:    &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(60))}},
			HealthCheckNodePort:      32000,
			Ports: []corev1.ServicePort{
				{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080},
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53},
				{Name: "sig", Protocol: corev1.ProtocolSCTP, Port: 65535},
			},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{IP: "203.0.113.1"},
			{IP: "203.0.113.2", IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)},
			{IP: "203.0.113.3", IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)},
			{IP: "203.0.113.4", IPMode: ptr.To(corev1.LoadBalancerIPMode("New"))},
			{Hostname: "lb.example.org"},
		}}},
	}
}

// Each row is a Service that differs from a valid one in one field.
var serviceTests = []struct {
	name     string
	edit     func(*corev1.Service)
	want     func(*lb.Service)
	problems []string // fields
}{
	{
		"as it was",
		func(*corev1.Service) {},
		func(*lb.Service) {}, nil,
	}, {
		"of an API server that knows one address only",
		func(s *corev1.Service) { s.Spec.ClusterIPs, s.Spec.IPFamilies = nil, nil },
		func(s *lb.Service) { s.Families = nil }, nil,
	}, {
		"with a list, but no cluster IP",
		func(s *corev1.Service) { s.Spec.ClusterIP = "" },
		func(s *lb.Service) { s.ClusterIPs = nil }, nil,
	}, {
		"with families, but no list",
		func(s *corev1.Service) { s.Spec.ClusterIPs = nil },
		func(s *lb.Service) { s.ClusterIPs = nil }, nil,
	}, {
		"headless",
		func(s *corev1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} },
		func(s *lb.Service) { s.ClusterIPs = nil }, nil,
	}, {
		"a name for something outside",
		func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "", nil
		},
		func(s *lb.Service) { s.Type, s.ClusterIPs = lb.ExternalName, nil }, nil,
	}, {
		"of a type of the future",
		func(s *corev1.Service) { s.Spec.Type = "Teleport" },
		func(*lb.Service) {}, []string{"spec.type"},
	}, {
		"with a cluster IP that is none: the other keeps its family",
		func(s *corev1.Service) {
			s.Spec.ClusterIPs = []string{"10.96.0.300", "fd00::1"}
			s.Spec.IPFamilies = []corev1.IPFamily{"IPv4", "IPv6"}
		},
		func(s *lb.Service) {
			s.ClusterIPs = []netip.Addr{{}, netip.MustParseAddr("fd00::1")}
			s.Families = []lb.Family{lb.IPv4, lb.IPv6}
		}, []string{"spec.clusterIPs[0]"},
	}, {
		"of a family of the future",
		func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{"IPv7"} },
		func(s *lb.Service) { s.Families = []lb.Family{0} }, []string{"spec.ipFamilies[0]"},
	}, {
		"with an external IP that is none, and a blank one",
		func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"nowhere", "", " "} },
		func(s *lb.Service) { s.ExternalIPs = make([]netip.Addr, 3) }, []string{"spec.externalIPs[0]"},
	}, {
		"with source ranges that are none, and a blank one",
		func(s *corev1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "", "10.0.0.0", "10.0.0.0/33"}
		},
		func(s *lb.Service) { s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} },
		[]string{"spec.loadBalancerSourceRanges[2]", "spec.loadBalancerSourceRanges[3]"},
	}, {
		"with a load balancer's address that is none",
		func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "a"}, {IP: "1.2.3"}}
		},
		func(s *lb.Service) { s.LoadBalancers = make([]lb.LoadBalancerIP, 2) },
		[]string{"status.loadBalancer.ingress[1].ip"},
	}, {
		"with policies of the future",
		func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy, s.Spec.ExternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicy("Far")), "Far"
		},
		func(*lb.Service) {}, nil,
	}, {
		"sticky without saying how long",
		func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP },
		func(s *lb.Service) { s.Affinity = 3 * time.Hour }, nil,
	}, {
		"sticky for no time",
		func(s *corev1.Service) {
			s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(0))}}
		},
		func(s *lb.Service) { s.Affinity = 3 * time.Hour },
		[]string{"spec.sessionAffinityConfig.clientIP.timeoutSeconds"},
	}, {
		"not sticky, with a time all the same",
		func(s *corev1.Service) {
			s.Spec.SessionAffinity = corev1.ServiceAffinityNone
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(60))}}
		},
		func(*lb.Service) {}, nil,
	}, {
		"with an algorithm",
		func(s *corev1.Service) { s.Annotations = map[string]string{"sluice-lb.io/algorithm": "lc"} },
		func(s *lb.Service) { s.Algorithm = lb.LeastConnections }, nil,
	}, {
		"with an algorithm that is none",
		func(s *corev1.Service) { s.Annotations = map[string]string{"sluice-lb.io/algorithm": "wrr"} },
		func(*lb.Service) {}, []string{"metadata.annotations[sluice-lb.io/algorithm]"},
	}, {
		"with a limit of healing",
		func(s *corev1.Service) { s.Annotations = map[string]string{"sluice-lb.io/heal": "off"} },
		func(s *lb.Service) { s.Healing = lb.HealOff }, nil,
	}, {
		"with a limit of healing that is none",
		func(s *corev1.Service) { s.Annotations = map[string]string{"sluice-lb.io/heal": "default"} },
		func(*lb.Service) {}, []string{"metadata.annotations[sluice-lb.io/heal]"},
	}, {
		"with a misspelt annotation",
		func(s *corev1.Service) {
			s.Annotations = map[string]string{"sluice-lb.io/algoritm": "lc", "sluice-lb.io/": ""}
		},
		func(*lb.Service) {}, []string{"metadata.annotations[sluice-lb.io/]", "metadata.annotations[sluice-lb.io/algoritm]"},
	}, {
		"with no algorithm after all",
		func(s *corev1.Service) { s.Annotations = map[string]string{"sluice-lb.io/algorithm": ""} },
		func(*lb.Service) {}, []string{"metadata.annotations[sluice-lb.io/algorithm]"},
	}, {
		"with an annotation of another program",
		func(s *corev1.Service) { s.Annotations = map[string]string{"example.org/algorithm": "lc"} },
		func(*lb.Service) {}, nil,
	}, {
		"without a protocol",
		func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "" },
		func(*lb.Service) {}, nil,
	}, {
		"with labels instead of annotations",
		func(s *corev1.Service) { s.Labels = map[string]string{"sluice-lb.io/heal": "off", "app": "web"} },
		func(*lb.Service) {}, []string{"metadata.labels[sluice-lb.io/heal]"},
	}, {
		"of a protocol of the future",
		func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "QUIC" },
		func(s *lb.Service) { s.Ports = s.Ports[:0] }, []string{"spec.ports[0].protocol"},
	}, {
		"with numbers that are no ports",
		func(s *corev1.Service) {
			s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort, s.Spec.HealthCheckNodePort = 65536, -1, 1<<20
		},
		func(s *lb.Service) { s.Ports[0].Port = 0 },
		[]string{"spec.healthCheckNodePort", "spec.ports[0].port", "spec.ports[0].nodePort"},
	},
}

func TestTranslateServiceField(t *testing.T) {
	for _, test := range serviceTests {
		t.Run(test.name, func(t *testing.T) {
			obj := service("web", "10.96.0.1")
			obj.Spec.ClusterIPs = []string{"10.96.0.1"}
			obj.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
			want := lb.Service{
				Name:       lb.ServiceName{Namespace: "default", Name: "web"},
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
				Families:   []lb.Family{lb.IPv4},
				Ports:      []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
			}
			test.edit(obj)
			test.want(&want)
			got, problems := translateService(obj)
			if diff := cmp.Diff(want, got, compareAddrs); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			mustBlame(t, "Service default/web", problems, test.problems)
		})
	}
}

// mustBlame fails unless the problems are of these fields of an object.
func mustBlame(t *testing.T, object string, problems []lb.Problem, fields []string) {
	t.Helper()
	var got []string
	for _, p := range problems {
		got = append(got, p.Field)
		if p.Object != object {
			t.Errorf("the problem %q is of %q, want %q", p, p.Object, object)
		}
	}
	if diff := cmp.Diff(fields, got); diff != "" {
		t.Errorf("fields with problems (-want +got):\n%s", diff)
	}
}

// BenchmarkTranslateHeavy reads Services as large as an object can be, each at two
// sizes: the second takes twice the time of the first.
func BenchmarkTranslateHeavy(b *testing.B) {
	for _, n := range []int{10_000, 20_000} {
		obj := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "heavy"}}
		for i := range n {
			ip := fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
			obj.Spec.ExternalIPs = append(obj.Spec.ExternalIPs, ip)
			obj.Spec.LoadBalancerSourceRanges = append(obj.Spec.LoadBalancerSourceRanges, ip+"/33", ip+"/32")
			obj.Spec.Ports = append(obj.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)})
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				translate(obj)
			}
		})
	}
}
