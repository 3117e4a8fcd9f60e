package proxy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// tools returns the programs that kube-proxy finds, by the names that it looks for: some
// binaries are several programs in one and choose by their name.
func tools(kind Kind) map[string]string {
	found := make(map[string]string)
	iptables := func(program string) {
		for _, family := range []string{"iptables", "ip6tables"} {
			for _, act := range []string{"", "-save", "-restore"} {
				found[family+act] = program
			}
		}
	}
	switch kind {
	case IPTables:
		iptables("xtables-nft-multi")
	case IPTablesLegacy:
		iptables("xtables-legacy-multi")
	case NFTables:
		found["nft"] = "nft"
	case IPVS:
		iptables("xtables-nft-multi")
		found["ipset"] = "ipset"
	}

	return found
}

// linkTools makes a folder inside of directory with links to the programs that
// kube-proxy needs for a kind, and returns its path.
func linkTools(kind Kind, directory string) (string, error) {
	folder := filepath.Join(directory, "tools")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	for name, program := range tools(kind) {
		path, err := findProgram(program)
		if err != nil {
			return "", err
		}
		if err := os.Symlink(path, filepath.Join(folder, name)); err != nil {
			return "", err
		}
	}

	return folder, nil
}

// findProgram looks for a program of the system, whatever the PATH of the caller.
func findProgram(name string) (string, error) {
	for _, folder := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
		if path, err := exec.LookPath(filepath.Join(folder, name)); err == nil {
			return path, nil
		}
	}

	return "", fmt.Errorf("there is no program %s on this machine", name)
}
