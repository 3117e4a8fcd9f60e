// Package datapath puts the programs of package bpf into the kernel: it loads,
// pins, attaches, replaces, verifies and removes them.
package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
)

// Config says where the datapath lives and what it does.
type Config struct {
	// CgroupRoot is a folder of a cgroup2 mount: sockets of processes in it
	// and below are translated.
	CgroupRoot string
	// BPFRoot is a folder on bpffs. Maps and links are pinned below it.
	BPFRoot string
	// UDP says which UDP sockets are translated.
	UDP bpf.UDPMode
	// UDPIdle is how long a UDP flow without a datagram keeps its backend;
	// zero is bpf.DefaultUDPIdle.
	UDPIdle time.Duration
	// Attachment is how programs are attached to devices; empty is [TCX]
	// where the kernel has it, else [Clsact].
	Attachment Attachment
	// ScopeBySource: of what comes by devices that lead to pods, only sources in
	// the map of local CIDRs are pods.
	ScopeBySource bool
	// ICMPPerSecond and ICMPBurst limit the ICMP errors that devices answer with, see
	// [bpf.DeviceConfig].
	ICMPPerSecond, ICMPBurst uint32
	// Mark is set, at devices, on packets that clients send to Services.
	Mark bpf.Mark
	// NoStats: nobody wants to know what each frontend has seen.
	NoStats bool
	// CountBytes attaches the hook that counts the bytes of TCP connections.
	CountBytes bool
	// NoLocalhostNodePorts: node ports do not answer on 127.0.0.1 and ::1.
	NoLocalhostNodePorts bool
	// Capacities overrides the sizes of maps, see [maps.Options].
	Capacities map[string]uint32
}

// Validate returns an error that names the field and what is wrong with it.
func (c Config) Validate() error {
	if err := checkCgroup2(c.CgroupRoot); err != nil {
		return fmt.Errorf("cgroup root %q: %w", c.CgroupRoot, err)
	}
	if err := CheckBPFRoot(c.BPFRoot); err != nil {
		return err
	}
	if c.UDP > bpf.UDPAll {
		return fmt.Errorf("UDP mode %d: there is no such mode", c.UDP)
	}
	if _, err := ParseAttachment(string(c.Attachment)); err != nil {
		return fmt.Errorf("attachment to devices: %w", err)
	}

	return nil
}

// Datapath is the kernel's side of Sluice. What it attaches stays attached
// when it is closed.
type Datapath struct {
	cfg      Config
	features Features
	maps     *maps.Pinned
	programs func() (*bpf.Programs, error) // waits until they are loaded
	links    *links
	devices  devicePrograms
	kernel   *btf.Cache // nil: no more programs are about to be loaded
}

// Open adopts the pinned maps, or creates them, and begins to load the programs:
// the verifier takes longer than all else together, see [Datapath.Loaded]. It
// must be called in the network namespace of the node. Nothing is attached yet.
// The error wraps [maps.ErrStale] if the pinned maps have another layout.
func Open(cfg Config) (*Datapath, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	features, err := ProbeFeatures()
	if err != nil {
		return nil, err
	}

	return open(cfg, features)
}

// open loads for a kernel with these features.
func open(cfg Config, features Features) (*Datapath, error) {
	if cfg.Attachment == TCX && !features.TCX {
		return nil, errors.New("attachment to devices: this kernel has no tcx (Linux 6.6)")
	}
	pinned, err := maps.Create(cfg.BPFRoot, maps.Options{Capacities: cfg.Capacities})
	if err != nil {
		return nil, err
	}
	kernel := btf.NewCache()
	programs := sync.OnceValues(func() (*bpf.Programs, error) {
		return bpf.Load(pinned, bpf.Config{
			UDP:             cfg.UDP,
			UDPIdle:         cfg.UDPIdle,
			HostNetnsCookie: features.NetnsCookie,
			SetRetval:       features.SetRetval,
			NoStats:         cfg.NoStats,
			CountBytes:      cfg.CountBytes,
			Keep:            programDir(cfg.BPFRoot),
			Kernel:          kernel,

			NoLocalhostNodePorts: cfg.NoLocalhostNodePorts,
		})
	})
	go programs()

	return &Datapath{
		cfg: cfg, features: features, maps: pinned, programs: programs, kernel: kernel,
		links:   &links{bpfRoot: cfg.BPFRoot, open: make(map[string]link.Link)},
		devices: newDevicePrograms(),
	}, nil
}

// Loaded waits until the programs that are attached to sockets are loaded, and
// returns why they could not be.
func (d *Datapath) Loaded() error {
	_, err := d.programs()

	return err
}

// Maps returns the maps. They stay owned by d.
func (d *Datapath) Maps() *maps.Pinned { return d.maps }

// Features returns what the kernel has.
func (d *Datapath) Features() Features { return d.features }

// MissingPins returns the pins that are missing of maps and of links, see
// [Datapath.MendPins].
func (d *Datapath) MissingPins() []string {
	return slices.Concat(missingFiles(d.maps.Pins()), d.links.unpinned())
}

// MendPins pins again what is open and whose pin is missing: maps, and links of
// attached programs. All of it works without; but the next agent would find
// nothing, and what is not pinned ends with this process. It returns the pins that
// were missing.
func (d *Datapath) MendPins() ([]string, error) {
	if err := CheckBPFRoot(d.cfg.BPFRoot); err != nil {
		return nil, err
	}
	ofMaps, err := d.maps.PinAgain()
	ofLinks, linkErr := d.links.pinAgain()

	return slices.Concat(ofMaps, ofLinks), errors.Join(err, linkErr)
}

// Close releases what this process holds. What is pinned stays in force.
func (d *Datapath) Close() error {
	errs := []error{d.devices.close(), d.links.close()}
	if programs, err := d.programs(); err == nil {
		errs = append(errs, programs.Close())
	}

	return errors.Join(append(errs, d.maps.Close())...)
}

// Remove detaches all programs and removes all pins below bpfRoot, those of
// other versions too, and nothing else. From devices, it detaches what is pinned
// there, and the filters of the network namespace that it is called in. Removing
// what is not there is not an error; a folder that is not on bpffs is one.
func Remove(bpfRoot string) error {
	if err := CheckBPFRoot(bpfRoot); err != nil {
		return err
	}
	if err := errors.Join(removeLinks(bpfRoot), removeDevices(bpfRoot)); err != nil {
		return err
	}
	versions, err := maps.Folders(bpfRoot)
	if err != nil {
		return err
	}
	for _, dir := range append(versions, linkDir(bpfRoot), programDir(bpfRoot)) {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("pins: %w", err)
		}
	}
	// What else is in the folder is not ours, nor is the root of bpffs.
	err = os.Remove(bpfRoot)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("pins: %w", err)
	}

	return nil
}
