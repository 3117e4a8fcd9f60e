package datapath

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/test/lab"
)

func TestConfigValidate(t *testing.T) {
	cgroup := lab.MustCgroup(t, "config").Path()
	good := Config{CgroupRoot: cgroup, BPFRoot: "/sys/fs/bpf/sluice-test-config"}
	for _, test := range []struct {
		name   string
		change func(*Config)
		want   string // "" is no error
	}{
		{"good", func(*Config) {}, ""},
		{"the root of bpffs itself", func(c *Config) { c.BPFRoot = "/sys/fs/bpf" }, ""},
		{"without a cgroup root", func(c *Config) { c.CgroupRoot = "" }, `cgroup root "": a path is required`},
		{"without that cgroup", func(c *Config) { c.CgroupRoot += "/none" }, "no such file"},
		{"on no cgroup2", func(c *Config) { c.CgroupRoot = "/proc" }, `cgroup root "/proc": not on a cgroup2`},
		{"without a bpf root", func(c *Config) { c.BPFRoot = "" }, `bpf root "": a path is required`},
		{"two folders below bpffs", func(c *Config) { c.BPFRoot = "/sys/fs/bpf/none/none" }, "no such file"},
		{"on no bpffs", func(c *Config) { c.BPFRoot = "/proc" }, `bpf root "/proc": not on a bpf`},
		{"of no UDP mode", func(c *Config) { c.UDP = bpf.UDPAll + 1 }, "UDP mode 2: there is no such mode"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := good
			test.change(&cfg)
			err := cfg.Validate()
			if test.want == "" {
				lab.Must(t, err)
			} else if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	t.Run("refused by Open", func(t *testing.T) {
		if _, err := Open(Config{}); err == nil {
			t.Error("no error")
		}
	})
}
