package bpf

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// typesOfKernel are where the kernel tells the types and functions of itself, and of the module
// that tracks connections, if that is loaded.
var typesOfKernel = []string{"/sys/kernel/btf/vmlinux", "/sys/kernel/btf/nf_conntrack"}

// KnowsConntrack reports whether programs can ask netfilter which connections it tracks, see
// [DeviceConfig].Conntrack: Linux 5.18 lets them, where the module is loaded or built in. It looks
// for the name of the function, and does not read types, which takes a while.
func KnowsConntrack() (bool, error) {
	for _, path := range typesOfKernel {
		knows, err := fileContains(path, "bpf_skb_ct_lookup")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || knows {
			return knows, err
		}
	}

	return false, nil
}

// fileContains reports whether a file has a text in it.
func fileContains(path, text string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	buffer := make([]byte, 256<<10)
	kept := 0 // of the part before, in which the text may begin
	for {
		n, err := f.Read(buffer[kept:])
		if bytes.Contains(buffer[:kept+n], []byte(text)) {
			return true, nil
		}
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("%s: %w", path, err)
		}
		end := kept + n
		kept = min(end, len(text)-1)
		copy(buffer, buffer[end-kept:end])
	}
}
