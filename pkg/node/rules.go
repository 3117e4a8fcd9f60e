package node

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// Class is what a device leads to.
type Class uint8

// The classes.
const (
	ClassNone   Class = iota // nothing is attached
	ClassPods                // pods of this node and nobody else
	ClassUplink              // everybody else
)

// String returns the word that people see, nothing for [ClassNone].
func (c Class) String() string {
	switch c {
	case ClassPods:
		return "pods"
	case ClassUplink:
		return "uplink"
	default:
		return ""
	}
}

// Pattern stands for devices whose names match, as file names do in a shell.
type Pattern struct {
	Glob string
	// Class, unless it is ClassNone, is the class of these devices, whatever
	// they look like.
	Class Class
}

// String returns the pattern as it was written.
func (p Pattern) String() string {
	if p.Class == ClassNone {
		return p.Glob
	}

	return p.Glob + "=" + p.Class.String()
}

// matches is false for a glob that ParsePattern would have refused.
func (p Pattern) matches(name string) bool {
	ok, err := path.Match(p.Glob, name)

	return ok && err == nil
}

// ParsePattern reads "GLOB", "GLOB=pods" or "GLOB=uplink".
func ParsePattern(text string) (Pattern, error) {
	glob, class, fixed := strings.Cut(text, "=")
	p := Pattern{Glob: glob}
	if glob == "" {
		return p, fmt.Errorf("%q: it names no device", text)
	}
	if _, err := path.Match(glob, ""); err != nil {
		return p, fmt.Errorf("%q: %w", text, err)
	}
	switch {
	case !fixed:
	case class == ClassPods.String():
		p.Class = ClassPods
	case class == ClassUplink.String():
		p.Class = ClassUplink
	default:
		return p, fmt.Errorf("%q: after = it is pods or uplink", text)
	}

	return p, nil
}

// Rules are what the configuration says of devices. The zero value leaves all to
// what they look like.
type Rules struct {
	// Only: if there are any, no other device is attached to. The first one that
	// matches counts.
	Only []Pattern
	// Never are not attached to, whatever else is said.
	Never []Pattern
	// PodBridge and PodPrefix are kube-proxy's detectLocalMode BridgeInterface
	// and InterfaceNamePrefix: devices that look like those of pods are so only
	// if they are this bridge or named so, or ports of a bridge that is.
	PodBridge string
	PodPrefix string
}

// Validate says what is wrong with the rules.
func (r Rules) Validate() error {
	for _, p := range r.Never {
		if p.Class != ClassNone {
			return fmt.Errorf("%s: what is not attached to has no class", p)
		}
	}
	if r.PodBridge != "" && r.PodPrefix != "" {
		return errors.New("rules: PodBridge and PodPrefix are both set")
	}

	return nil
}

// find returns the first pattern that matches.
func find(patterns []Pattern, name string) (Pattern, bool) {
	for _, p := range patterns {
		if p.matches(name) {
			return p, true
		}
	}

	return Pattern{}, false
}
