// Package datapath puts the programs of package bpf into the kernel: it loads,
// pins, attaches, replaces, verifies and removes them.
//
// [Open] creates or adopts the maps and loads the programs; [Datapath.Attach]
// attaches those of sockets to a cgroup (hook.go), [Datapath.AttachDevices] those of
// devices (device.go). [Remove] undoes all of it.
package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
)

// Config is the configuration of a [Datapath].
type Config struct {
	// CgroupRoot is a folder of a cgroup2 mount. Sockets of processes in it and
	// below are translated.
	CgroupRoot string
	// BPFRoot is a folder on bpffs. Maps and links are pinned below it.
	BPFRoot string
	// UDP selects which UDP sockets are translated.
	UDP bpf.UDPMode
	// UDPIdle is the time for which an idle UDP flow keeps its backend; zero means
	// bpf.DefaultUDPIdle.
	UDPIdle time.Duration
	// Attachment is how programs are attached to devices; empty is [TCX]
	// where the kernel has it, else [Clsact].
	Attachment Attachment
	// ScopeBySource limits pods to source addresses in the map of local CIDRs. Without
	// it, all packets that enter by a device of pods come from pods.
	ScopeBySource bool
	// ICMPPerSecond and ICMPBurst limit the ICMP errors that programs of devices send,
	// see [bpf.DeviceConfig].
	ICMPPerSecond, ICMPBurst uint32
	// Mark is set, at devices, on packets that clients send to Services.
	Mark bpf.Mark
	// NoStats switches off the statistics of service ports.
	NoStats bool
	// Handshakes measures the TCP handshakes and retransmissions of translated sockets, where the
	// kernel has [Features].Tracing.
	Handshakes bool
	// BackendHandshakes counts them for each backend, too.
	BackendHandshakes bool
	// NoLocalhostNodePortsV4 keeps node ports from answering on 127.0.0.1, and NoLocalhostNodePortsV6
	// on ::1.
	NoLocalhostNodePortsV4, NoLocalhostNodePortsV6 bool
	// PodOptOut lets pods opt out, see OptedOut of [maps.Tables].
	PodOptOut bool
	// HashSeed is the seed of what programs hash, the same on all nodes: see [bpf.SeedOf].
	HashSeed uint32
	// Heal passes over backends that do not answer, see docs/healing.md.
	Heal bool
	// Resteer leads connections whose backend does not answer to another one.
	Resteer bool
	// Capacities overrides the sizes of maps, and Least is how large some are at least, see [maps.Options].
	Capacities, Least map[string]uint32
}

// Validate returns an error that names the field and what is wrong with it.
func (c Config) Validate() error {
	if err := CheckCgroupRoot(c.CgroupRoot); err != nil {
		return err
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
	config   bpf.Config
	programs func() (*bpf.Programs, error) // waits until they are loaded
	links    *links
	devices  devicePrograms
	hooked   atomic.Bool // the programs of sockets are attached, by this process
}

// Open adopts the pinned maps, or creates them, and begins to load the programs of
// sockets, which takes longer than all else together: see [Datapath.Loaded]. It must
// be called in the network namespace of the node. It attaches nothing.
// If only programs of another instance act on this node, Open moves its pins to BPFRoot first.
// The error wraps [maps.ErrStale] if the pinned maps have another layout, and [ErrRunning] if the agent of another
// instance runs and nothing of our own is in force, see [Other].
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

// open is [Open] for a kernel with these features.
func open(cfg Config, features Features) (*Datapath, error) {
	if cfg.Attachment == TCX && !features.TCX {
		return nil, errors.New("attachment to devices: this kernel has no tcx (Linux 6.6)")
	}
	taken, err := inheritRoot(cfg.BPFRoot, cfg.CgroupRoot)
	if err != nil {
		return nil, err
	}
	inUse, err := mapsInUse(cfg.BPFRoot)
	if err != nil && !errors.Is(err, unix.EPERM) { // of a missing capability, loading programs says which
		return nil, err
	}
	pinned, err := maps.Create(cfg.BPFRoot, maps.Options{
		InUse:      inUse,
		Capacities: cfg.Capacities, Least: cfg.Least, Handshakes: cfg.Handshakes && features.Tracing,
		BackendHandshakes: cfg.BackendHandshakes && cfg.Handshakes && features.Tracing,
	})
	if err != nil {
		return nil, explainLimit(err)
	}
	inode, err := node.NetnsInode()
	if err != nil {
		return nil, fmt.Errorf("network namespace of the node: %w", err)
	}
	config := bpf.Config{
		UDP:             cfg.UDP,
		UDPIdle:         cfg.UDPIdle,
		HostNetnsCookie: features.NetnsCookie,
		HostNetnsInode:  uint32(inode), // the kernel has no larger ones
		SetRetval:       features.SetRetval,
		NoStats:         cfg.NoStats,
		Handshakes:      cfg.Handshakes && features.Tracing,
		Keep:            programDir(cfg.BPFRoot),

		BackendHandshakes:      cfg.BackendHandshakes,
		NoLocalhostNodePortsV4: cfg.NoLocalhostNodePortsV4, NoLocalhostNodePortsV6: cfg.NoLocalhostNodePortsV6,
		PodOptOut: cfg.PodOptOut,
		HashSeed:  cfg.HashSeed,
		Heal:      cfg.Heal && features.Tracing,
		Resteer:   cfg.Resteer,
		ProbeAddr: ProbeAddr,
	}
	programs := sync.OnceValues(func() (*bpf.Programs, error) {
		loaded, err := bpf.Load(pinned, config)

		return loaded, explainLimit(err)
	})
	go programs()

	return &Datapath{
		cfg: cfg, features: features, maps: pinned, config: config, programs: programs,
		links: &links{bpfRoot: cfg.BPFRoot, open: make(map[string]link.Link), untraced: make(map[string]error), taken: taken},
		devices: devicePrograms{
			taken: make(map[string]string),
			config: bpf.DeviceConfig{
				ScopeBySource: cfg.ScopeBySource,
				Mark:          cfg.Mark,
				ICMPPerSecond: cfg.ICMPPerSecond,
				ICMPBurst:     cfg.ICMPBurst,
				UDPIdle:       cfg.UDPIdle,
				NoStats:       cfg.NoStats,
				HashSeed:      cfg.HashSeed,
				Heal:          cfg.Heal,
				Resteer:       cfg.Resteer,
				Keep:          programDir(cfg.BPFRoot),
				FIBSource:     features.FIBSource,
				ChecksumIPv6:  features.ChecksumIPv6,
				Conntrack:     features.Conntrack,

				ConntrackHidden: features.ConntrackHidden,
			},
			loaded: make(map[bpf.DeviceConfig]*bpf.DevicePrograms), filtered: make(map[int]bool),
			ours: make(map[position]*ebpf.Program), ahead: make(map[position][]attached), overtaken: make(map[position]map[ebpf.ProgramID]bool), front: make(map[position]bool),
		},
	}, nil
}

// Prepare mounts bpffs where it is missing, creates the maps and loads the programs once,
// as an agent does before it attaches anything. It returns an error if the kernel refuses
// them. The maps stay pinned. It must be called in the network namespace of the node. The
// error wraps [ErrRunning] if an agent has the maps.
func Prepare(cfg Config) (err error) {
	if err := MountBPFFS(cfg.BPFRoot); err != nil {
		return err
	}
	lock, err := LockMaps(cfg.BPFRoot)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	d, err := Open(cfg)
	if err != nil {
		return err
	}

	return errors.Join(d.Loaded(), d.Close())
}

// linkDir returns the folder of pinned links. It is not in the folder of a map
// version: a build with another layout updates the same links, so that there is no
// moment without a program.
func linkDir(bpfRoot string) string { return filepath.Join(bpfRoot, "links") }

// traceDir returns the folder of pinned links of tracepoints. Such a link cannot be detached, and an agent that knows no
// tracepoints ends what it finds in linkDir and does not know: it would never finish. It leaves folders alone.
func traceDir(bpfRoot string) string { return filepath.Join(linkDir(bpfRoot), "trace") }

// programDir returns the folder of pinned programs, which the next agent reuses
// without verifying them again.
func programDir(bpfRoot string) string { return filepath.Join(bpfRoot, "programs") }

// Loaded waits until the programs of sockets are loaded, and returns the error of
// loading them.
func (d *Datapath) Loaded() error {
	_, err := d.programs()

	return err
}

// Maps returns the maps, which d closes.
func (d *Datapath) Maps() *maps.Pinned { return d.maps }

// LogSizes logs the size of each map, and which have another capacity than [Config].Capacities.
func (d *Datapath) LogSizes(log *slog.Logger) error {
	sizes, err := d.maps.Sizes()
	if err != nil {
		return err
	}
	var total uint64
	var attrs []any
	for _, size := range sizes {
		attrs = append(attrs, slog.String(size.Name, fmt.Sprintf("%d entries, %d KiB", size.Entries, size.Bytes>>10)))
		total += size.Bytes
		if want := d.cfg.Capacities[size.Name]; want != 0 && want != size.Entries {
			log.Warn("map keeps the size that it was created with, and the flows in it: a new size (--flow-table-memory) takes effect after a reboot or sluice cleanup",
				"map", size.Name, "entries", size.Entries, "wanted", want)
		}
	}
	log.Info("maps", append(attrs, slog.String("all", fmt.Sprintf("%d MiB", total>>20)))...)

	return nil
}

// Features returns the features of the kernel.
func (d *Datapath) Features() Features { return d.features }

// MissingPins returns the paths of the pins of maps and links that are missing, see
// [Datapath.MendPins].
func (d *Datapath) MissingPins() []string {
	return slices.Concat(missingFiles(d.maps.Pins()), d.links.unpinned())
}

// pins returns the paths of the pins of maps and links, of those that are missing, too.
func (d *Datapath) pins() []string { return slices.Concat(d.maps.Pins(), d.links.pins()) }

// MendPins pins again the maps and links whose pins are missing. They work without
// pins, but only until this process ends, and the next agent could not adopt them.
// It returns the paths of the pins that were missing.
func (d *Datapath) MendPins() ([]string, error) {
	if err := CheckBPFRoot(d.cfg.BPFRoot); err != nil {
		return nil, err
	}
	ofMaps, err := d.maps.PinAgain()
	ofLinks, linkErr := d.links.pinAgain()

	return slices.Concat(ofMaps, ofLinks), errors.Join(err, linkErr)
}

// Close closes maps, programs and links. Those that are pinned stay in force.
func (d *Datapath) Close() error {
	errs := []error{d.devices.close(), d.links.close()}
	if programs, err := d.programs(); err == nil {
		errs = append(errs, programs.Close())
	}

	return errors.Join(append(errs, d.maps.Close())...)
}

// Remove detaches all programs and removes all pins below bpfRoot, including those
// of other versions, and nothing else. It detaches the links of devices that are
// pinned there, and the filters of devices in the calling thread's network namespace: its
// own, and those of which no pin is found anywhere.
// That there is nothing to remove is not an error; that bpfRoot is not on bpffs is.
func Remove(bpfRoot string) error {
	if err := CheckBPFRoot(bpfRoot); err != nil {
		return err
	}

	others, err := othersByFilters(bpfRoot)
	if err != nil {
		return err
	}
	ofOthers := func(id ebpf.ProgramID) bool {
		return slices.ContainsFunc(others, func(o Other) bool { return o.BPFRoot != "" && slices.Contains(o.programs, id) })
	}

	return errors.Join(removeRoot(bpfRoot), detachFilters(nil, func(int) bool { return false }, ofOthers))
}

// removeRoot detaches all links that are pinned below a bpf root, and removes all pins there.
func removeRoot(bpfRoot string) error {
	none := func(string) bool { return false }
	sockets := errors.Join(removePinned(linkDir(bpfRoot), removalOrder(), none), removePinned(traceDir(bpfRoot), nil, none))
	if err := errors.Join(sockets, detachTCX(bpfRoot, func(int) bool { return false })); err != nil {
		return err
	}
	versions, err := maps.Folders(bpfRoot)
	if err != nil {
		return err
	}
	for _, dir := range append(versions, linkDir(bpfRoot), programDir(bpfRoot), cleanupDir(bpfRoot)) {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("pins: %w", err)
		}
	}
	// The folder stays if it has files of others, or is the root of bpffs.
	err = os.Remove(bpfRoot)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("pins: %w", err)
	}

	return nil
}

// VerifierLog returns the log of the kernel's verifier if err is that of a program
// that it refused, else "".
func VerifierLog(err error) string {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return ""
	}

	return fmt.Sprintf("%+v", refused)
}

// NotKept returns why programs of sockets could not be pinned for the next agent, which then
// takes longer to start; nil if all are.
func (d *Datapath) NotKept() error {
	programs, err := d.programs()
	if err != nil {
		return err
	}

	return programs.NotKept
}

// DevicesNotKept is [Datapath.NotKept] for the programs of devices. It must not be called at
// the same time as [Datapath.AttachDevices].
func (d *Datapath) DevicesNotKept() error {
	var errs []error
	for _, programs := range d.devices.loaded {
		errs = append(errs, programs.NotKept)
	}

	return errors.Join(errs...)
}

// removeKept unpins the programs of other builds, and of this one with another configuration.
func (d *Datapath) removeKept() error {
	programs, err := d.programs()
	if err != nil {
		return err
	}
	used := slices.Clone(programs.Kept)
	for _, devices := range d.devices.loaded {
		used = append(used, devices.Kept...)
	}
	entries, err := os.ReadDir(programDir(d.cfg.BPFRoot))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kept programs: %w", err)
	}
	for _, entry := range entries {
		pin := filepath.Join(programDir(d.cfg.BPFRoot), entry.Name())
		if slices.Contains(used, pin) {
			continue
		}
		if err := os.Remove(pin); err != nil {
			return fmt.Errorf("kept programs: %w", err)
		}
	}

	return nil
}
