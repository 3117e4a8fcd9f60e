package node

import (
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

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
