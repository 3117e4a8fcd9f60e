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
	ClassPods                // pods of this node only
	ClassUplink              // all others
)

// String returns the word that flags and tables use, and "" for [ClassNone].
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

// Pattern matches names of devices, as a shell matches file names.
type Pattern struct {
	Glob string
	// Class is the class of these devices; ClassNone leaves it to [Decide].
	Class Class
}

// String returns the pattern as it was written.
func (p Pattern) String() string {
	if p.Class == ClassNone {
		return p.Glob
	}

	return p.Glob + "=" + p.Class.String()
}

// matches reports whether the name matches. An invalid glob matches nothing.
func (p Pattern) matches(name string) bool {
	ok, err := path.Match(p.Glob, name)

	return ok && err == nil
}

// ParsePattern reads "GLOB", "GLOB=pods" or "GLOB=uplink".
func ParsePattern(text string) (Pattern, error) {
	glob, class, fixed := strings.Cut(text, "=")
	p := Pattern{Glob: glob}
	if glob == "" {
		return p, fmt.Errorf("%q: the pattern of the name is empty", text)
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

// Rules are the configuration of devices. With the zero value, [Decide] classifies
// all devices by their looks.
type Rules struct {
	// Only, unless it is empty, limits attaching to devices that match. The first
	// pattern that matches decides.
	Only []Pattern
	// Never excludes devices. It takes precedence over the others.
	Never []Pattern
	// PodBridge and PodPrefix are kube-proxy's detectLocalMode BridgeInterface
	// and InterfaceNamePrefix: devices that look like those of pods are so only
	// if they are this bridge or named so, or ports of a bridge that is.
	PodBridge string
	PodPrefix string
}

// Validate returns an error if the rules contradict each other.
func (r Rules) Validate() error {
	for _, p := range r.Never {
		if p.Class != ClassNone {
			return fmt.Errorf("%s: an excluded device has no class", p)
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
