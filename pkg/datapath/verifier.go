package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// VerifierLog returns all that the kernel's verifier said, if err comes from a
// program that it refused, else nothing.
func VerifierLog(err error) string {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return ""
	}

	return fmt.Sprintf("%+v", refused)
}
