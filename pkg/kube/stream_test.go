package kube

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// connected returns both ends of a connection: ours is one of a Stream.
func connected(t *testing.T) (ours *conn, peer *net.TCPConn, drained *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	c, err := net.Dial("tcp", listener.Addr().String())
	must(t, err)
	accepted, err := listener.Accept()
	must(t, err)
	raw, err := c.(*net.TCPConn).SyscallConn()
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		_ = accepted.Close()
	})
	drained = &atomic.Int32{}
	stream := &Stream{drained: func() { drained.Add(1) }}

	return &conn{TCPConn: c.(*net.TCPConn), raw: raw, stream: stream}, accepted.(*net.TCPConn), drained
}

func TestConnReads(t *testing.T) {
	ours, peer, drained := connected(t)
	if n, err := ours.Read(nil); n != 0 || err != nil || drained.Load() != 0 {
		t.Errorf("reading nothing: %d, %v, drained %d times", n, err, drained.Load())
	}
	time.AfterFunc(20*time.Millisecond, func() { _, _ = peer.Write([]byte("first")) })
	buf := make([]byte, 3)
	if n, err := ours.Read(buf); err != nil || string(buf[:n]) != "fir" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if got := drained.Load(); got != 1 {
		t.Errorf("drained %d times before there was anything, want once", got)
	}
	if n, err := ours.Read(buf); err != nil || string(buf[:n]) != "st" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
	if got := drained.Load(); got != 1 {
		t.Errorf("drained %d times while there was more", got)
	}
	must(t, peer.CloseWrite())
	if n, err := ours.Read(buf); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %d, %v", n, err)
	}
}

func TestConnFails(t *testing.T) {
	t.Run("with a reset", func(t *testing.T) {
		ours, peer, _ := connected(t)
		must(t, peer.SetLinger(0))
		must(t, peer.Close())
		var failed *net.OpError
		if _, err := ours.Read(make([]byte, 1)); !errors.As(err, &failed) {
			t.Errorf("read %v", err)
		}
	})
	t.Run("at a deadline", func(t *testing.T) {
		ours, _, _ := connected(t)
		must(t, ours.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
		if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read %v", err)
		}
	})
	t.Run("when it is closed", func(t *testing.T) {
		ours, _, _ := connected(t)
		time.AfterFunc(20*time.Millisecond, func() { _ = ours.Close() })
		if _, err := ours.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("read %v", err)
		}
	})
}

// directOn returns a direct watch that reads these events, and the sink behind it.
func directOn(stream ...[]byte) (*direct, *recorder) {
	sink := newRecorder()
	into := &store{tracker: newTracker(sink, slog.New(slog.DiscardHandler)), replaced: func() {}}
	body := io.NopCloser(bytes.NewReader(bytes.Join(stream, nil)))

	return &direct{source: &decoder{body: body}, store: into}, sink
}

// frameOf returns an event about a slice of this version, whose one endpoint is addr.
func frameOf(kind watch.EventType, version, addr string) []byte {
	obj := slice("web-1", "web", addr)
	resourceOf(obj)
	obj.ResourceVersion = version
	if kind == watch.Bookmark {
		obj.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}

	return protobufFrame(apiEvent{kind, obj})
}

// mustDecode returns the version of the next object that the Reflector gets.
func mustDecode(t *testing.T, d *direct, want watch.EventType) string {
	t.Helper()
	kind, obj, err := d.Decode()
	if err != nil || kind != want {
		t.Fatalf("decoded %q, %v, want %q", kind, err, want)
	}
	if slice, ok := obj.(*discoveryv1.EndpointSlice); ok {
		return slice.ResourceVersion
	}

	return ""
}

// fill sets everything in v to values that differ from each other: strings are numbers.
func fill(v reflect.Value, next *int) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), next)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), next)
		fill(v.Index(1), next)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, next)
		fill(value, next)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[metav1.Time]() {
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), next)
		}
	case reflect.String:
		*next++
		v.SetString(strconv.Itoa(*next))
	case reflect.Bool:
		*next++
		v.SetBool(*next%2 == 0)
	case reflect.Uint8:
		v.SetUint('1')
	default:
		*next++
		v.SetInt(int64(*next))
	}
}

// What decode leaves out of an object changes nothing: a field that translateSlice begins to
// read fails here until unmarshalSlice decodes it.
func TestDecodeKeepsWhatIsRead(t *testing.T) {
	full, next := &discoveryv1.EndpointSlice{}, 0
	fill(reflect.ValueOf(full).Elem(), &next)
	resourceOf(full)
	full.AddressType = discoveryv1.AddressTypeIPv4
	full.Labels[discoveryv1.LabelServiceName] = "web"
	full.Annotations[corev1.EndpointsLastChangeTriggerTime] = "2026-11-22T21:00:00Z"
	protocol := corev1.ProtocolTCP
	for i := range full.Endpoints {
		full.Endpoints[i].Addresses[0] = fmt.Sprintf("10.0.1.%d", i)
		full.Ports[i].Protocol = &protocol
	}
	body := io.NopCloser(bytes.NewReader(protobufFrame(apiEvent{watch.Modified, full})))
	_, got, err := (&decoder{body: body}).decode()
	must(t, err)
	decoded := got.(*discoveryv1.EndpointSlice)
	if decoded.ManagedFields != nil || decoded.Endpoints[0].TargetRef != nil {
		t.Error("fields were decoded that are not read")
	}
	want, is := translate(full), translate(decoded)
	if len(want.problems) > 0 || want.value == nil {
		t.Fatalf("the object is bad: %v", want.problems)
	}
	diff := cmp.Diff(want.value, is.value, compareAddrs)
	if diff != "" || is.key != want.key || decoded.ResourceVersion != full.ResourceVersion {
		t.Errorf("version %q, want %q; -want +got:\n%s", decoded.ResourceVersion, full.ResourceVersion, diff)
	}
}

// The Reflector watches from the last version that Decode returned. If it did not get that of
// a change that the store has, the server would send old events again.
func TestDirectReturnsTheVersion(t *testing.T) {
	expired := apierrors.NewResourceExpired("too old").Status()
	expired.Kind, expired.APIVersion = "Status", "v1"
	for _, test := range []struct {
		name string
		end  []byte
		want func(t *testing.T, d *direct)
	}{
		{"at the end", nil, func(t *testing.T, d *direct) {
			if _, _, err := d.Decode(); !errors.Is(err, io.EOF) {
				t.Errorf("the end is %v", err)
			}
		}},
		{"in the middle of an event", frameOf(watch.Modified, "9", "10.0.1.9")[:20], func(t *testing.T, d *direct) {
			if _, _, err := d.Decode(); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("the end is %v", err)
			}
		}},
		{"before an error", protobufFrame(apiEvent{watch.Error, &expired}), func(t *testing.T, d *direct) {
			kind, obj, err := d.Decode()
			if status, ok := obj.(*metav1.Status); kind != watch.Error || err != nil || !ok || status.Code != 410 {
				t.Errorf("the error is %v %v %v", kind, obj, err)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, sink := directOn(frameOf(watch.Added, "7", "10.0.1.7"), frameOf(watch.Modified, "8", "10.0.1.8"), test.end)
			if got := mustDecode(t, d, watch.Bookmark); got != "8" {
				t.Errorf("the Reflector gets version %q, want 8", got)
			}
			mustBecome(t, sink, "EndpointSlice default/web-1", "default/web [8080/TCP] [10.0.1.8]")
			test.want(t, d)
		})
	}
}

// The initial events of a streamed list go to the Reflector, and the events after them wait
// until the store has the list, which would overwrite them otherwise.
func TestDirectWaitsForTheList(t *testing.T) {
	d, sink := directOn(
		frameOf(watch.Added, "7", "10.0.1.7"), frameOf(watch.Bookmark, "7", "10.0.1.7"), frameOf(watch.Modified, "8", "10.0.1.8"))
	d.listed = d.store.awaitReplace()
	mustDecode(t, d, watch.Added)
	mustDecode(t, d, watch.Bookmark)
	next := make(chan string)
	go func() {
		_, obj, _ := d.Decode()
		next <- obj.(*discoveryv1.EndpointSlice).ResourceVersion
	}()
	select {
	case version := <-next:
		t.Fatalf("version %s was decoded before the store had the list", version)
	case <-time.After(50 * time.Millisecond):
	}
	must(t, d.store.Replace([]any{slice("web-1", "web", "10.0.1.7")}, "7"))
	if got := <-next; got != "8" {
		t.Errorf("the Reflector gets version %q, want 8", got)
	}
	mustBecome(t, sink, "EndpointSlice default/web-1", "default/web [8080/TCP] [10.0.1.8]")
}

// A watch that ends before the list is in the store does not wait for it.
func TestDirectEndsBeforeTheList(t *testing.T) {
	d, _ := directOn(frameOf(watch.Bookmark, "7", "10.0.1.7"))
	d.listed = d.store.awaitReplace()
	mustDecode(t, d, watch.Bookmark)
	ended := make(chan struct{})
	close(ended)
	d.ended = ended
	if _, _, err := d.Decode(); !errors.Is(err, io.EOF) {
		t.Errorf("the end is %v", err)
	}
}

// Nothing is reported to the sink after Run has returned.
func TestDirectIsSilentAfterTheEnd(t *testing.T) {
	d, sink := directOn(frameOf(watch.Added, "7", "10.0.1.7"))
	d.store.close()
	mustDecode(t, d, watch.Bookmark)
	mustHave(t, sink)
}

func TestDirectRefusesAHugeEvent(t *testing.T) {
	d, _ := directOn(binary.BigEndian.AppendUint32(nil, maxEvent+1))
	if _, _, err := d.Decode(); err == nil || !strings.Contains(err.Error(), "16777217 bytes") {
		t.Errorf("decoded %v", err)
	}
}

// An object without a kind is not decoded as the kind of the one before.
func TestDirectRefusesAnObjectOfNoKind(t *testing.T) {
	nameless := metav1.WatchEvent{Type: string(watch.Added), Object: runtime.RawExtension{Raw: []byte("k8s\x00")}}
	encoded, err := nameless.Marshal()
	must(t, err)
	d, _ := directOn(frameOf(watch.Added, "7", "10.0.1.7"), binary.BigEndian.AppendUint32(nil, uint32(len(encoded))), encoded)
	mustDecode(t, d, watch.Bookmark)
	if _, _, err := d.Decode(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("decoded %v", err)
	}
}

// No field of an object remains in the next one, although buffers are reused.
func TestDirectForgetsTheEventBefore(t *testing.T) {
	long, short := slice("web-1", "web", "10.0.1.7", "10.0.1.8"), slice("web-2", "web")
	long.Labels["more"] = strings.Repeat("x", 1000)
	var frames [][]byte
	for _, obj := range []*discoveryv1.EndpointSlice{long, short, long} {
		resourceOf(obj)
		frames = append(frames, protobufFrame(apiEvent{watch.Added, obj}))
	}
	d, sink := directOn(frames...)
	if _, _, err := d.Decode(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	mustBecome(t, sink, "EndpointSlice default/web-1", "default/web [8080/TCP] [10.0.1.7 10.0.1.8]")
	mustBecome(t, sink, "EndpointSlice default/web-2", "default/web [8080/TCP] []")
}
