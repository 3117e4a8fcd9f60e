package lab

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Everything the lab creates outside of a namespace is named
// sluice-<pid>-<random>-<what>: the process with this ID cleans it up, and
// [Sweep] does so once that process has ended.
const namePrefix = "sluice-"

var nameFormat = regexp.MustCompile(`^sluice-([0-9]+)-[0-9a-z]{6}(-|$)`)

// newName returns a name that no other run uses.
func newName(what string) string {
	return fmt.Sprintf("%s%d-%s-%s", namePrefix, os.Getpid(), strings.ToLower(rand.Text()[:6]), what)
}

// ownerOf returns the process that made what carries this name. It is false for
// names that are not the lab's.
func ownerOf(name string) (pid int, ok bool) {
	match := nameFormat.FindStringSubmatch(name)
	if match == nil {
		return 0, false
	}
	pid, err := strconv.Atoi(match[1])

	return pid, err == nil && pid > 0
}

// isGone reports whether no process has this ID any more.
func isGone(pid int) bool {
	return errors.Is(unix.Kill(pid, 0), unix.ESRCH)
}
