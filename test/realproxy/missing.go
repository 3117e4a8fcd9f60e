package realproxy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/sluice-lb/sluice/test/lab"
)

// What of the kernel kube-proxy's rules need, in the words of nft and of
// iptables-restore.
const (
	nftablesRules = `table ip trial {
	map chosen { typeof ip daddr . meta l4proto . th dport : verdict; }
	set affinity { typeof ip saddr; flags dynamic,timeout; timeout 3h; }
	chain nat { type nat hook prerouting priority dstnat; ct state new numgen random mod 2 vmap { 0 : drop, 1 : accept }; }
	chain out { type nat hook postrouting priority srcnat; fib daddr type local masquerade fully-random; }
	chain probe { meta l4proto tcp dnat to 192.0.2.1 : 80; }
}
`
	iptablesRules = `*nat
:KUBE-TRIAL - [0:0]
-A PREROUTING -m comment --comment "a Service" -j KUBE-TRIAL
-A KUBE-TRIAL -m addrtype --dst-type LOCAL -m statistic --mode random --probability 0.5 -j MARK --or-mark 0x4000
-A KUBE-TRIAL -m recent --name trial --rcheck --seconds 10 --reap -p tcp -j DNAT --to-destination 192.0.2.1:80
-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully
COMMIT
*filter
-A FORWARD -m conntrack --ctstate INVALID -j DROP
COMMIT
`
)

// Missing returns an error that names what this machine lacks for a mode: programs,
// or parts of the kernel, which it tries in a namespace of the lab.
func Missing(mode Mode) error {
	directory, err := os.MkdirTemp("", "sluice-trial-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(directory)
	if err := missing(mode, directory); err != nil {
		return fmt.Errorf("%s: %w", mode, err)
	}

	return nil
}

func missing(mode Mode, directory string) error {
	if mode == IPVS {
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil && exec.Command("modprobe", "--dry-run", "ip_vs").Run() != nil {
			return errors.New("this kernel has no IPVS (CONFIG_IP_VS)")
		}
	}
	folder, err := linkTools(mode, directory)
	if err != nil {
		return err
	}
	switch mode {
	case NFTables:
		return try(nftablesRules, filepath.Join(folder, "nft"), "-f", "-")
	case IPTables, IPTablesLegacy, IPVS:
		return try(iptablesRules, filepath.Join(folder, "iptables-restore"))
	default:
		return nil
	}
}

// try feeds rules to a program in a namespace that goes away then.
func try(rules, program string, args ...string) (err error) {
	ns, err := lab.NewNamespace("trial")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	var printed strings.Builder
	cmd := exec.Command(program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(rules), &printed, &printed
	if err := lab.Start(ns, nil, cmd); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("this kernel does not take its rules: %w: %s", err, strings.TrimSpace(printed.String()))
	}

	return nil
}
