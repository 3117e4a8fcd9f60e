package main

import (
	"fmt"
	"strconv"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"
	netutils "k8s.io/utils/net"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/pkg/config"
)

// ipFlag is the value of a flag that takes an address. An empty text leaves the default.
type ipFlag struct{ address *string }

func (f *ipFlag) Type() string   { return "ip" }
func (f *ipFlag) String() string { return *f.address }

func (f *ipFlag) Set(text string) error {
	if text == "" {
		return nil
	}
	if netutils.ParseIPSloppy(text) == nil {
		return fmt.Errorf("%q is no IP address", text)
	}
	*f.address = text

	return nil
}

// ipPortFlag is the value of a flag that takes an address with or without a port.
// An empty text leaves the default.
type ipPortFlag struct{ address *string }

func (f *ipPortFlag) Type() string   { return "ipport" }
func (f *ipPortFlag) String() string { return *f.address }

func (f *ipPortFlag) Set(text string) error {
	if text == "" {
		return nil
	}
	// fillIn adds a missing port when all flags are known.
	if _, err := config.ParseAddrPort(config.WithPort(text, 1)); err != nil {
		return err
	}
	*f.address = text

	return nil
}

// modeFlag and localModeFlag accept any text: [config.Validate] checks it with the
// rest of the configuration.
type modeFlag v1alpha1.ProxyMode

func (f *modeFlag) Type() string   { return "ProxyMode" }
func (f *modeFlag) String() string { return string(*f) }

func (f *modeFlag) Set(text string) error {
	*f = modeFlag(text)

	return nil
}

type localModeFlag v1alpha1.LocalMode

func (f *localModeFlag) Type() string   { return "LocalMode" }
func (f *localModeFlag) String() string { return string(*f) }

func (f *localModeFlag) Set(text string) error {
	*f = localModeFlag(text)

	return nil
}

// versionFlag is the value of --version: true, false or raw.
type versionFlag string

func (f *versionFlag) Type() string     { return "version" }
func (f *versionFlag) IsBoolFlag() bool { return true }

func (f *versionFlag) String() string {
	if *f == "" {
		return "false"
	}

	return string(*f)
}

func (f *versionFlag) Set(text string) error {
	if text != "raw" {
		if _, err := strconv.ParseBool(text); err != nil {
			return fmt.Errorf("it is true, false or raw")
		}
	}
	*f = versionFlag(text)

	return nil
}

// requested reports whether the version is to be printed, and whether as JSON (raw).
func (f *versionFlag) requested() (requested, raw bool) {
	if *f == "raw" {
		return true, true
	}
	requested, _ = strconv.ParseBool(f.String()) // Set has checked it

	return requested, false
}

// markFlag selects bits of a packet's mark, as VALUE/MASK. Without a mask it selects the
// bits that are set in the value.
type markFlag bpf.Mark

func (f *markFlag) Type() string { return "mark" }

func (f *markFlag) String() string {
	if f.Mask == 0 {
		return ""
	}

	return fmt.Sprintf("%#x/%#x", f.Value, f.Mask)
}

func (f *markFlag) Set(text string) error {
	value, mask, masked := strings.Cut(text, "/")
	if !masked {
		mask = value
	}
	v, err := strconv.ParseUint(value, 0, 32)
	if err != nil {
		return fmt.Errorf("value: %w", err)
	}
	m, err := strconv.ParseUint(mask, 0, 32)
	if err != nil {
		return fmt.Errorf("mask: %w", err)
	}
	if v == 0 || v&^m != 0 {
		return fmt.Errorf("%q: the value must have bits, and only those of the mask", text)
	}
	*f = markFlag{Value: uint32(v), Mask: uint32(m)}

	return nil
}
