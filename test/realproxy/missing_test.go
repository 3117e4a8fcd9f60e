package realproxy

import (
	"os"
	"os/exec"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// Missing tries the rules of each mode.
func TestMissing(t *testing.T) {
	if err := try("no rules", "/usr/sbin/nft", "-f", "-"); err == nil {
		t.Error("nft takes what are no rules")
	}
	_, err := exec.Command("modprobe", "--dry-run", "ip_vs").Output()
	_, there := os.Stat("/proc/net/ip_vs")
	hasIPVS := there == nil || err == nil
	if err := Missing(IPVS); (err == nil) != hasIPVS {
		t.Errorf("IPVS is missing: %v, want that it is there: %t", err, hasIPVS)
	}
}
