package maps

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// windowSize is how much of an array comes into this process' memory at once, in
// bytes: a number of whole pages, whatever their size.
const windowSize = 1 << 18

// windows are an array map in this process' memory, piece by piece, as its parts
// are used. The kernel counts all that is mapped as the process' memory from the
// moment of mapping on, touched or not, and most of a large array never is.
// Any goroutine may use them.
type windows struct {
	name string
	m    *ebpf.Map
	size int // of the array, in bytes

	first  []atomic.Pointer[byte] // of each window; nil: not mapped
	mu     sync.Mutex
	mapped [][]byte
}

// newWindows returns the windows of an array whose values are stride bytes apart.
func newWindows(name string, m *ebpf.Map, stride int) *windows {
	size := int(m.MaxEntries()) * stride

	return &windows{name: name, m: m, size: size, first: make([]atomic.Pointer[byte], (size+windowSize-1)/windowSize)}
}

// at returns where the byte at offset is in memory. What is there stays there
// until close.
func (w *windows) at(offset int) (unsafe.Pointer, error) {
	if offset < 0 || offset >= w.size {
		return nil, fmt.Errorf("map %s: byte %d of %d", w.name, offset, w.size)
	}
	i := offset / windowSize
	first := w.first[i].Load()
	if first == nil {
		var err error
		if first, err = w.open(i); err != nil {
			return nil, err
		}
	}

	return unsafe.Add(unsafe.Pointer(first), offset%windowSize), nil
}

// open maps window i, unless somebody else just has.
func (w *windows) open(i int) (*byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if first := w.first[i].Load(); first != nil {
		return first, nil
	}
	memory, err := w.look(i)
	if err != nil {
		return nil, err
	}
	w.mapped = append(w.mapped, memory)
	w.first[i].Store(&memory[0])

	return &memory[0], nil
}

// look maps window i for the caller, who unmaps it.
func (w *windows) look(i int) ([]byte, error) {
	page := os.Getpagesize()
	whole := (w.size + page - 1) / page * page
	memory, err := unix.Mmap(w.m.FD(), int64(i)*windowSize, min(windowSize, whole-i*windowSize),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: memory: %w", w.name, err)
	}

	return memory, nil
}

func (w *windows) close() error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var errs []error
	for i := range w.first {
		w.first[i].Store(nil)
	}
	for _, memory := range w.mapped {
		errs = append(errs, unix.Munmap(memory))
	}
	w.mapped = nil

	return errors.Join(errs...)
}
