package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const maxChunks = int(abiChunkMAX_CHUNKS)

// Chunks are added to an array in batches of chunkBatch, and addedAtOnce of them concurrently: each
// blocks a thread, and threads stay.
const (
	chunkBatch  = 8
	addedAtOnce = 64
)

// chunked is an array of chunks in the kernel. The chunks are pinned as well, because opening a
// map by its id takes SYS_ADMIN.
type chunked struct {
	name  string
	outer *ebpf.Map
	inner *ebpf.MapSpec
	dir   string // in which the chunks are pinned

	mu     sync.Mutex
	chunks []*ebpf.Map // by number
	memory [][]byte    // of the chunks that are mapped, by number
}

// chunksFolder is the folder, below the pins, in which the chunks are pinned.
const chunksFolder = "chunks"

func (c *chunked) pin(chunk int) string { return chunkPin(c.dir, c.name, chunk) }

func chunkPin(dir, name string, chunk int) string {
	return filepath.Join(dir, chunksFolder, fmt.Sprintf("%s_%d", name, chunk))
}

// adopt opens the pinned chunks, and adds those to the outer map that an agent pinned but was
// killed before it added.
func (c *chunked) adopt() error {
	if err := c.openPinned(); err != nil {
		return err
	}
	for i, m := range c.chunks {
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("map %s: chunk %d: %w", c.name, i, err)
		}
		var found uint32
		if id, _ := info.ID(); c.outer.Lookup(uint32(i), &found) == nil && found == uint32(id) {
			continue
		}
		if err := c.outer.Put(uint32(i), m); err != nil {
			return fmt.Errorf("map %s: chunk %d: %w", c.name, i, err)
		}
	}

	return nil
}

// openPinned opens the pinned chunks that are not open yet. It returns an error wrapping
// [ErrStale] if one has another layout or another size.
func (c *chunked) openPinned() error {
	for i := len(c.chunks); ; i++ {
		m, err := ebpf.LoadPinnedMap(c.pin(i), nil)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("map %s: chunk %d: %w", c.name, i, err)
		}
		err = sameLayout(m, c.inner)
		if have, want := m.MaxEntries(), c.inner.MaxEntries; err == nil && have != want {
			err = fmt.Errorf("%w: it has %d values; in this build, a chunk has %d", ErrStale, have, want)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("map %s: chunk %d: %w", c.name, i, err), m.Close())
		}
		c.chunks = append(c.chunks, m)
	}
}

// have returns chunk i, or nil.
func (c *chunked) have(i int) *ebpf.Map {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i < len(c.chunks) {
		return c.chunks[i]
	}

	return nil
}

// place returns the chunk with the value of an id, or nil, and the index in it.
func (c *chunked) place(id uint32) (*ebpf.Map, uint32) {
	perChunk := c.inner.MaxEntries

	return c.have(int(Index(id) / perChunk)), Index(id) % perChunk
}

// reserve makes places 0 to n-1 exist, without mapping them. The error wraps [ErrFull].
func (c *chunked) reserve(n int) error {
	need := chunksFor(n, int(c.inner.MaxEntries))
	if n == 0 || c.have(need-1) != nil {
		return nil
	}
	if err := c.extend(need); err != nil && c.have(need-1) == nil {
		return fmt.Errorf("map %s, %d places: %w: %w", c.name, n, ErrFull, err)
	}

	return nil
}

// extend makes chunks until there are n, or no memory is left. It pins them first, because the
// next agent has to find what programs use. A chunk that is already pinned was made by another
// process, or by an attempt that failed. Adding chunks waits until all running programs have ended,
// so many are added at once, and at least half as many as exist.
func (c *chunked) extend(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if most := int(c.outer.MaxEntries()); n > most {
		return fmt.Errorf("%d chunks: there can be %d", n, most)
	}
	have := len(c.chunks)
	if n > have {
		n = max(n, min(have+have/2, int(c.outer.MaxEntries())))
	}
	failed := c.openPinned()
	for i := len(c.chunks); i < n && failed == nil; i++ {
		var m *ebpf.Map
		if m, failed = c.create(i); failed == nil {
			c.chunks = append(c.chunks, m)
		}
	}
	more := c.chunks[have:]
	if err := c.add(have, more); err != nil {
		c.chunks = c.chunks[:have]

		return errors.Join(failed, err, closeAll(more))
	}

	return failed
}

// add puts chunks into the outer map, the first one at this number. A system call that adds chunks
// returns when all running programs have ended: since Linux 6.8 once for a whole batch, before for
// each chunk of it.
func (c *chunked) add(first int, chunks []*ebpf.Map) error {
	numbers, fds := make([]uint32, len(chunks)), make([]uint32, len(chunks))
	for i, m := range chunks {
		numbers[i], fds[i] = uint32(first+i), uint32(m.FD())
	}
	var adding errgroup.Group
	adding.SetLimit(addedAtOnce)
	for from := 0; from < len(chunks); from += chunkBatch {
		to := min(from+chunkBatch, len(chunks))
		adding.Go(func() error {
			_, err := c.outer.BatchUpdate(numbers[from:to], fds[from:to], nil)
			if !errors.Is(err, ebpf.ErrNotSupported) {
				return err
			}
			for i := from; i < to; i++ { // the kernel has no batches for arrays of maps
				if err := c.outer.Put(numbers[i], chunks[i]); err != nil {
					return err
				}
			}

			return nil
		})
	}

	return adding.Wait()
}

func (c *chunked) create(i int) (*ebpf.Map, error) {
	if err := os.MkdirAll(filepath.Join(c.dir, chunksFolder), 0o700); err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(c.inner)
	if err != nil {
		return nil, err
	}
	err = m.Pin(c.pin(i))
	if errors.Is(err, fs.ErrExist) { // another process has made it
		if err := m.Close(); err != nil {
			return nil, err
		}

		return ebpf.LoadPinnedMap(c.pin(i), nil)
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}

	return m, nil
}

func closeAll(chunks []*ebpf.Map) error {
	var errs []error
	for _, m := range chunks {
		errs = append(errs, m.Close())
	}

	return errors.Join(errs...)
}

// open makes chunks until there are n, and returns the memory of all.
func (c *chunked) open(n int) ([]unsafe.Pointer, error) {
	failed := c.extend(n)
	c.mu.Lock()
	defer c.mu.Unlock()
	page := os.Getpagesize()
	var at []unsafe.Pointer
	for i, m := range c.chunks {
		if i == len(c.memory) {
			size := (int(m.MaxEntries())*((int(m.ValueSize())+7)/8*8) + page - 1) / page * page
			memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return at, errors.Join(failed, fmt.Errorf("memory: %w", err))
			}
			c.memory = append(c.memory, memory)
		}
		at = append(at, unsafe.Pointer(&c.memory[i][0]))
	}

	return at, failed
}

// wait returns when every program that was running before has ended. The kernel guarantees that
// for an update of an array of maps (maybe_wait_bpf_programs, since Linux 4.20), even if it
// replaces an element by itself.
func (c *chunked) wait() error {
	first := c.have(0)
	if first == nil {
		return fmt.Errorf("map %s: wait for programs: it is closed", c.name)
	}
	if err := c.outer.Put(uint32(0), first); err != nil {
		return fmt.Errorf("map %s: wait for programs: %w", c.name, err)
	}

	return nil
}

func (c *chunked) close() error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, memory := range c.memory {
		errs = append(errs, unix.Munmap(memory))
	}
	errs = append(errs, closeAll(c.chunks))
	c.memory, c.chunks = nil, nil

	return errors.Join(errs...)
}

// mapArray returns the array with the chunks of c, all of them mapped, after making at least that
// many.
func mapArray[V any](c *chunked, least int) (*Array[V], error) {
	a := newArray[V](c.name, int(c.inner.MaxEntries), int(c.outer.MaxEntries()), c.open)

	return a, a.Reserve(max(len(c.chunks), least) * a.perChunk)
}
