package kubectl

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// kubelet stands in for the kubelet of a node, as the API server sees it: it serves exec by the code of kubelets
// and container runtimes, and the command runs in the node's namespace, on its agent.
type kubelet struct {
	agent *sluice.Node
	node  *lab.Node
}

// asked counts the verbs that ran on all nodes.
var asked sync.Map // of *atomic.Int64, by the verb

// mustKubelet returns the port on 127.0.0.1 on which it serves.
func mustKubelet(t testing.TB, agent *sluice.Node, node *lab.Node) int32 {
	t.Helper()
	k := kubelet{agent, node}
	mux := http.NewServeMux()
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", k.serveExec)
	// The API server expects HTTP/1.1 here, which connections can be taken over of.
	server := httptest.NewUnstartedServer(mux)
	server.TLS = &tls.Config{NextProtos: []string{"http/1.1"}}
	server.StartTLS()
	t.Cleanup(server.Close)

	return portOf(t, server.Listener.Addr())
}

func (k kubelet) serveExec(w http.ResponseWriter, r *http.Request) {
	options, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)

		return
	}
	remotecommand.ServeExec(w, r, k, r.PathValue("pod"), "", r.PathValue("container"), r.URL.Query()["command"], options,
		time.Minute, time.Minute, remotecommand.SupportedStreamingProtocols)
}

// ExecInContainer runs a command as runtimes do: it goes on when its client has gone, but its standard input ends.
func (k kubelet) ExecInContainer(_ context.Context, _, _, container string, command []string, in io.Reader, out, errs io.WriteCloser, _ bool, _ <-chan remotecommand.TerminalSize, _ time.Duration) error {
	if container != "sluice" || command[0] != "sluice" {
		return fmt.Errorf("the container %s has no %s", container, command[0])
	}
	for _, word := range command {
		count, _ := asked.LoadOrStore(word, new(atomic.Int64))
		count.(*atomic.Int64).Add(1)
	}
	cmd := exec.Command(k.agent.Binary(), append(k.agent.Places(), command[1:]...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = out, errs
	if err := lab.Start(k.node.Namespace, k.agent.AgentCgroup(), cmd); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(stdin, in) // until the client has gone, or the command has ended
		stdin.Close()
	}()
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	if err != nil && strings.Contains(err.Error(), "write") {
		return nil // the client has gone
	}

	return err
}
