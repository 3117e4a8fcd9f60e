package load

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The executable plays another role when this variable names one.
const roleVariable = "SLUICE_LOAD_ROLE"

const (
	roleGenerator = "generator"
	roleServer    = "server"
	roleProbe     = "probe"
)

// mainCalled reports whether [Main] runs in this executable. Without it, a child would
// run the whole program again, which would start another child.
var mainCalled atomic.Bool

// Main lets the package run this executable a second time, as load generator,
// server or probe. It is called first in main or TestMain; in such a second run it
// does the work and does not return.
func Main() {
	mainCalled.Store(true)

	var err error
	switch role := os.Getenv(roleVariable); role {
	case "":
		return
	case roleGenerator:
		err = generate(os.Stdin, os.Stdout)
	case roleServer:
		err = serve(os.Stdin, os.Stdout)
	case roleProbe:
		err = poll(os.Stdin, os.Stdout)
	default:
		err = fmt.Errorf("unknown %s=%s", roleVariable, role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// again returns a command that runs this executable in another role, with so many
// goroutines at a time. The runtime must not disturb the measurement. Goroutines
// that measure or serve block in system calls that the scheduler does not see, so each
// keeps its P: GOMAXPROCS is the exact number, because the scheduler wakes threads to look
// for work on spare ones. Garbage collection and preemption are off.
func again(role string, goroutines int) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "load-" + role
	cmd.Env = append(os.Environ(),
		roleVariable+"="+role,
		"GOMAXPROCS="+strconv.Itoa(goroutines),
		"GOGC=off",
		"GODEBUG=asyncpreemptoff=1",
	)

	return cmd
}

// exitAtEnd ends the process when the other end of stdin is closed.
func exitAtEnd() {
	var ignored [64]byte
	for n := 1; n > 0; {
		n, _ = read(unix.Stdin, ignored[:])
	}
	os.Exit(1)
}
