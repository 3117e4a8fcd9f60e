package lab

import (
	"fmt"
	"os"
	"os/exec"
	"sync/atomic"
)

// The executable takes another role when this variable names one.
const roleVariable = "SLUICE_LAB_ROLE"

const (
	roleCaller   = "caller"
	roleGuardian = "guardian"
)

// mainCalled is true once the executable can take other roles. Without it, a child would
// not become a caller but run the whole test again, which would start a child…
var mainCalled atomic.Bool

// again returns a command that runs this executable in another role. Its name in
// the list of processes is lab-caller or lab-guardian.
func again(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Args[0] = "lab-" + role
	cmd.Env = append(os.Environ(), roleVariable+"="+role, profileVariable+"="+processProfile.Name)

	return cmd
}

// Main lets the lab run this executable a second time, as a [Caller] or as the
// guardian that cleans up after a run that died. It is called first in TestMain,
// or in main; in such a second run it does not return.
//
//	func TestMain(m *testing.M) {
//		lab.Main()
//		os.Exit(m.Run())
//	}
func Main() {
	mainCalled.Store(true)

	var err error
	switch role := os.Getenv(roleVariable); role {
	case "":
		return
	case roleCaller:
		if processProfile, err = profileNamed(os.Getenv(profileVariable)); err == nil {
			err = ServeCalls(os.Stdin, os.Stdout)
		}
	case roleGuardian:
		err = guard(os.Stdin, os.Args[1:])
	default:
		err = fmt.Errorf("unknown %s=%s", roleVariable, role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
