package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// VerifierLog returns the log of the kernel's verifier if err is that of a program
// that it refused, else "".
func VerifierLog(err error) string {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return ""
	}

	return fmt.Sprintf("%+v", refused)
}
