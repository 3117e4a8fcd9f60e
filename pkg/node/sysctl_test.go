package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestConntrackMax(t *testing.T) {
	for _, test := range []struct {
		name                       string
		perCore, least, cores, max int
	}{
		{"so many for each core", 32768, 131072, 8, 262144},
		{"the least number on a small machine", 32768, 131072, 2, 131072},
		{"a million at most", 32768, 131072, 64, 1048576},
		{"a million at most, whatever the least number is", 1048577, 2000000, 1, 1048576},
		{"left alone without a number for each core", 0, 131072, 8, 0},
		{"so many without a least number", 100, 0, 3, 300},
	} {
		if got := ConntrackMax(test.perCore, test.least, test.cores); got != test.max {
			t.Errorf("%s: %d, want %d", test.name, got, test.max)
		}
	}
}

// kernelFiles is a folder with those files of the kernel, and four cores.
func kernelFiles(t *testing.T, values map[string]string) string {
	t.Helper()
	root := t.TempDir()
	values["sys/devices/system/cpu/online"] = "0-2,4\n"
	for name, value := range values {
		path := filepath.Join(root, name)
		lab.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		lab.Must(t, os.WriteFile(path, []byte(value), 0o644))
	}

	return root
}

const (
	sysctls = "proc/sys/net/netfilter/nf_conntrack_"
	buckets = "sys/module/nf_conntrack/parameters/hashsize"
)

func TestConntrackSet(t *testing.T) {
	for _, test := range []struct {
		name   string
		want   Conntrack
		before map[string]string
		set    []string
		err    string
	}{
		{
			"all of it", Conntrack{100, 1, time.Hour, time.Minute, true, 30 * time.Second, 2 * time.Minute},
			map[string]string{
				sysctls + "max": "1\n", buckets: "1\n", sysctls + "tcp_timeout_established": "1\n", sysctls + "tcp_timeout_close_wait": "1\n",
				sysctls + "tcp_be_liberal": "0\n", sysctls + "udp_timeout": "1\n", sysctls + "udp_timeout_stream": "1\n",
			},
			[]string{
				"nf_conntrack_max=400", "hashsize=100", "nf_conntrack_tcp_timeout_established=3600", "nf_conntrack_tcp_timeout_close_wait=60",
				"nf_conntrack_udp_timeout=30", "nf_conntrack_udp_timeout_stream=120", "nf_conntrack_tcp_be_liberal=1",
			}, "",
		},
		{"nothing that is so already", Conntrack{MaxPerCore: 100, TCPEstablished: time.Hour},
			map[string]string{sysctls + "max": "400\n", buckets: "100\n", sysctls + "tcp_timeout_established": "3600\n"}, nil, ""},
		{"no smaller table", Conntrack{MaxPerCore: 100},
			map[string]string{sysctls + "max": "9\n", buckets: "101\n"}, []string{"nf_conntrack_max=400"}, ""},
		{"a larger table also if only that is too small", Conntrack{MaxPerCore: 100},
			map[string]string{sysctls + "max": "400\n", buckets: "99\n"}, []string{"hashsize=100"}, ""},
		{"nothing that is zero", Conntrack{}, map[string]string{sysctls + "max": "9\n"}, nil, ""},
		{"the rest after an error", Conntrack{MaxPerCore: 100, TCPEstablished: time.Hour, UDPAnswered: time.Hour},
			map[string]string{sysctls + "max": "nonsense\n", buckets: "1\n", sysctls + "udp_timeout_stream": "1\n"},
			[]string{"nf_conntrack_udp_timeout_stream=3600"}, "nf_conntrack_max=400: strconv"},
		{"nothing without conntrack", Conntrack{MaxPerCore: 100, TCPEstablished: time.Hour}, map[string]string{}, nil, ErrNoConntrack.Error()},
	} {
		t.Run("it sets "+test.name, func(t *testing.T) {
			root := kernelFiles(t, test.before)
			set, err := test.want.setBelow(root)
			if diff := cmp.Diff(test.set, set); diff != "" {
				t.Errorf("set (-want +got):\n%s", diff)
			}
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("error is %v, want %q", err, test.err)
			}
			for _, line := range set {
				name, value, _ := strings.Cut(line, "=")
				path := filepath.Join(root, "proc/sys/net/netfilter", name)
				if name == "hashsize" {
					path = filepath.Join(root, buckets)
				}
				if got, err := os.ReadFile(path); err != nil || string(got) != value {
					t.Errorf("%s has %q, %v, want %s", name, got, err, value)
				}
			}
		})
	}
}

// The kernel tracks connections in the network namespace of this test if it does so at all.
func TestConntrackSetInKernel(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	var set []string
	read := make(map[string]string)
	err := ns.Do(func() error {
		var err error
		set, err = Conntrack{TCPEstablished: 4321 * time.Second, TCPCloseWait: 1234 * time.Second, TCPBeLiberal: true, UDPUnanswered: 12 * time.Second, UDPAnswered: 34 * time.Second}.Set()
		for _, line := range set {
			name, _, _ := strings.Cut(line, "=")
			value, readErr := os.ReadFile(filepath.Join("/proc/sys/net/netfilter", name))
			read[name] = strings.TrimSpace(string(value))
			err = errors.Join(err, readErr)
		}

		return err
	})
	if errors.Is(err, ErrNoConntrack) {
		t.Logf("nothing to set: %v", err)

		return
	}
	lab.Must(t, err)
	want := map[string]string{
		"nf_conntrack_tcp_timeout_established": "4321", "nf_conntrack_tcp_timeout_close_wait": "1234", "nf_conntrack_tcp_be_liberal": "1",
		"nf_conntrack_udp_timeout": "12", "nf_conntrack_udp_timeout_stream": "34",
	}
	if diff := cmp.Diff(want, read); diff != "" {
		t.Errorf("the kernel has (-want +got):\n%s", diff)
	}
}

func TestFamilies(t *testing.T) {
	for disabled, want := range map[string][]lb.Family{"0": {lb.IPv4, lb.IPv6}, "1": {lb.IPv4}} {
		ns := lab.MustNamespace(t, "node")
		mustSysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", disabled)
		var got []lb.Family
		lab.Must(t, ns.Do(func() error { got = Families(); return nil }))
		if !slices.Equal(got, want) {
			t.Errorf("disable_ipv6=%s: %v, want %v", disabled, got, want)
		}
	}
}

func TestICMPLimit(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	for _, test := range []struct {
		name           string
		second, atOnce string
		want           ICMPLimit
	}{
		{"the kernel's", "1000", "50", ICMPLimit{PerSecond: 1000, Burst: 50}},
		{"another", "7", "3", ICMPLimit{PerSecond: 7, Burst: 3}},
		{"none", "0", "50", ICMPLimit{Burst: 50}},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			for name, value := range map[string]string{"icmp_msgs_per_sec": test.second, "icmp_msgs_burst": test.atOnce} {
				if err := ns.Sysctl("net/ipv4/"+name, value); err != nil {
					t.Skipf("this kernel has it in its first namespace alone: %v", err)
				}
			}
			lab.MustDo(t, ns, func() error {
				got, err := ReadICMPLimit()
				if got != test.want {
					t.Errorf("limit is %+v, want %+v", got, test.want)
				}

				return err
			})
		})
	}
}

// Each case sets the sysctls of a network namespace of its own.
func TestMasqueradePorts(t *testing.T) {
	for _, test := range []struct {
		name                string
		ephemeral, reserved string
		unprivileged        string // the first port; "" is the kernel's default
		want                string // the largest first
		problem             string // a part of it
	}{
		{name: "all that are left by default", ephemeral: "32768 60999", want: "1024-29999 and 61000-65535 (33512 ports)"},
		{name: "above ephemeral ports that begin early", ephemeral: "10000 40000", want: "40001-65535 and 1024-9999 (34511 ports)"},
		{name: "between ephemeral ports and node ports", ephemeral: "1024 15000", want: "32768-65535 and 15001-29999 (47767 ports)"},
		{name: "just enough below ephemeral ports", ephemeral: "5120 65535", want: "1024-5119 (4096 ports)"},
		{name: "not what is reserved, where a server listens", ephemeral: "32768 60999", reserved: "10249,10250", want: "10251-29999 and 1024-10248 (28974 ports)"},
		{
			name: "shared with sockets, where too few others are left", ephemeral: "5119 65535",
			want: "32768-65535 and 1024-29999 (61744 ports)", problem: "sockets of the node get as well",
		},
		{
			name: "shared with sockets, where a range at the end is left", ephemeral: "1024 65000",
			want: "32768-65535 and 1024-29999 (61744 ports)", problem: "sockets of the node get as well",
		},
		{
			name: "shared with sockets, where these get all", ephemeral: "1024 65535",
			want: "32768-65535 and 1024-29999 (61744 ports)", problem: "sockets of the node get as well",
		},
		{
			name: "shared with sockets, without what is reserved", ephemeral: "1024 65535", reserved: "10249,10250",
			want: "32768-65535 and 10251-29999 (52517 ports)", problem: "sockets of the node get as well",
		},
		{
			name: "shared with sockets, also where a large range is reserved", ephemeral: "1024 65535", reserved: "30000-32767,50000-59999",
			want: "1024-29999 and 32768-49999 (46208 ports)", problem: "sockets of the node get as well",
		},
		{
			name: "those that are reserved, too, where these are all", ephemeral: "1024 65535", reserved: "1024-65000",
			want: "32768-65535 and 1024-29999 (61744 ports)", problem: "that are reserved",
		},
		{
			name: "few, where few are unprivileged", ephemeral: "65460 65535", unprivileged: "65460",
			want: "65460-65535 (76 ports)", problem: "there are 76 ports",
		},
		{name: "unprivileged, whatever the sysctl is", ephemeral: "32768 60999", unprivileged: "0", want: "1024-29999 and 61000-65535 (33512 ports)"},
	} {
		t.Run("they are "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			mustSysctl(t, ns, "net/ipv4/ip_local_port_range", test.ephemeral)
			mustSysctl(t, ns, "net/ipv4/ip_local_reserved_ports", test.reserved)
			if test.unprivileged != "" {
				mustSysctl(t, ns, "net/ipv4/ip_unprivileged_port_start", test.unprivileged)
			}
			got := mustReadMasqueradePorts(t, ns)
			if got.String() != test.want {
				t.Errorf("ports are %q, want %q", got, test.want)
			}
			problem, remedy := got.Problem()
			if (problem == "") != (test.problem == "") || (remedy == "") != (problem == "") || !strings.Contains(problem, test.problem) {
				t.Errorf("problem is %q, remedy %q, want %q", problem, remedy, test.problem)
			}
		})
	}
}

// The list of reserved ports is longer than a usual read, and leaves no two ports side by side below its end.
func TestMasqueradePortsOfALongList(t *testing.T) {
	ns := lab.MustNamespace(t, "node")
	mustSysctl(t, ns, "net/ipv4/ip_local_port_range", "1024 65535")
	var list strings.Builder
	for port := 10001; port < 20000; port += 2 {
		list.WriteString(",")
		list.WriteString(bpf.PortRange{Low: uint16(port), High: uint16(port)}.String())
	}
	mustSysctl(t, ns, "net/ipv4/ip_local_reserved_ports", list.String()[1:]+",40000-65535")
	if got := mustReadMasqueradePorts(t, ns).String(); got != "20000-29999 and 1024-10000 (18977 ports)" {
		t.Errorf("ports are %q, want those beside the list", got)
	}
}

func mustSysctl(t *testing.T, ns *lab.Namespace, name, value string) {
	t.Helper()
	lab.Must(t, ns.Sysctl(name, value))
}

func mustReadMasqueradePorts(t *testing.T, ns *lab.Namespace) (ports MasqueradePorts) {
	t.Helper()
	lab.MustDo(t, ns, func() (err error) {
		ports, err = ReadMasqueradePorts()

		return err
	})

	return ports
}
