package cluster

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// RunKubectl runs kubectl as cluster-admin and returns what it writes to its
// standard output. Input is its standard input, as for "apply -f -". The error of
// one that fails includes what it printed.
func (c *Cluster) RunKubectl(input string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(c.Binary("kubectl"), args...)
	cmd.Stdin = strings.NewReader(input)
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr
	// Its home holds a discovery cache, and might hold a user's preferences.
	cmd.Env = append(os.Environ(), "HOME="+c.directory, "KUBECONFIG="+c.Kubeconfig())

	p, err := c.namespace.start(cmd)
	if err == nil {
		err = p.wait()
	}
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, &stderr)
	}

	return stdout.String(), nil
}
