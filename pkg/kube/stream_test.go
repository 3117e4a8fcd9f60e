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

	"github.com/sluice-lb/sluice/test/lab"
)

// connected returns both ends of a connection: ours is one of a Stream.
func connected(t *testing.T) (ours *conn, peer *net.TCPConn, drained *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	defer listener.Close()
	c, err := net.Dial("tcp", listener.Addr().String())
	lab.Must(t, err)
	accepted, err := listener.Accept()
	lab.Must(t, err)
	raw, err := c.(*net.TCPConn).SyscallConn()
	lab.Must(t, err)
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
	lab.Must(t, peer.CloseWrite())
	if n, err := ours.Read(buf); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %d, %v", n, err)
	}
}

func TestConnFails(t *testing.T) {
	t.Run("with a reset", func(t *testing.T) {
		ours, peer, _ := connected(t)
		lab.Must(t, peer.SetLinger(0))
		lab.Must(t, peer.Close())
		var failed *net.OpError
		if _, err := ours.Read(make([]byte, 1)); !errors.As(err, &failed) {
			t.Errorf("read %v", err)
		}
	})
	t.Run("at a deadline", func(t *testing.T) {
		ours, _, _ := connected(t)
		lab.Must(t, ours.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
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

	return &direct{source: &decoder{body: body}, store: into, example: &discoveryv1.EndpointSlice{}, flushed: true}, sink
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

// What decode leaves out of an object changes nothing: a field that translateSlice or
// translateService begins to read fails here until it is decoded.
func TestDecodeKeepsWhatIsRead(t *testing.T) {
	protocol, created := corev1.ProtocolTCP, metav1.Unix(1_760_000_000, 0)
	slice, next := &discoveryv1.EndpointSlice{}, 0
	fill(reflect.ValueOf(slice).Elem(), &next)
	slice.AddressType = discoveryv1.AddressTypeIPv4
	slice.Labels[discoveryv1.LabelServiceName] = "web"
	slice.Annotations[corev1.EndpointsLastChangeTriggerTime] = "2026-11-22T21:00:00Z"
	for i := range slice.Endpoints {
		slice.Endpoints[i].Addresses[0] = fmt.Sprintf("10.0.1.%d", i)
		slice.Ports[i].Protocol = &protocol
	}
	service := &corev1.Service{}
	fill(reflect.ValueOf(service).Elem(), &next)
	service.CreationTimestamp = created
	service.Annotations = map[string]string{AlgorithmAnnotation: "lc", HealAnnotation: "off", SocketKey: "off", "other": "x"}
	spec, proxied := &service.Spec, corev1.LoadBalancerIPModeProxy
	local := corev1.ServiceInternalTrafficPolicyLocal
	spec.Type, spec.SessionAffinity = corev1.ServiceTypeLoadBalancer, corev1.ServiceAffinityClientIP
	spec.InternalTrafficPolicy, spec.ExternalTrafficPolicy = &local, corev1.ServiceExternalTrafficPolicyLocal
	spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	spec.ClusterIP, spec.ClusterIPs = "fd00::1", []string{"fd00::1", "10.96.0.1"}
	spec.ExternalIPs, spec.LoadBalancerSourceRanges = []string{"192.0.2.1", "192.0.2.2"}, []string{"10.0.0.0/8", "fd00::/8"}
	for i := range spec.Ports {
		spec.Ports[i].Protocol = protocol
		service.Status.LoadBalancer.Ingress[i].IP = fmt.Sprintf("192.0.2.%d", 10+i)
		service.Status.LoadBalancer.Ingress[i].IPMode = &proxied
	}
	for _, full := range []apiObject{slice, service} {
		resourceOf(full)
		body := io.NopCloser(bytes.NewReader(protobufFrame(apiEvent{watch.Modified, full})))
		_, got, err := (&decoder{body: body}).decode()
		lab.Must(t, err)
		decoded := got.(apiObject)
		if decoded.GetManagedFields() != nil || decoded.GetAnnotations()["other"] != "" {
			t.Error("fields were decoded that are not read")
		}
		want, is := translate(full), translate(decoded)
		if len(want.problems) > 0 || want.value == nil {
			t.Fatalf("the object is bad: %v", want.problems)
		}
		diff := cmp.Diff(want.value, is.value, compareAddrs)
		if diff != "" || is.key != want.key || decoded.GetResourceVersion() != full.GetResourceVersion() {
			t.Errorf("%s: version %q, want %q; -want +got:\n%s", want.key, decoded.GetResourceVersion(), full.GetResourceVersion(), diff)
		}
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

// The objects of a streamed list are reported as they arrive. At its end, those that it does not
// have are deleted, and what the Reflector replaces then is nothing: it was not given any object.
func TestDirectReportsAList(t *testing.T) {
	d, sink := directOn(frameOf(watch.Added, "7", "10.0.1.7"), frameOf(watch.Bookmark, "9", "10.0.1.7"), frameOf(watch.Modified, "10", "10.0.1.10"))
	lab.Must(t, d.store.Replace([]any{slice("web-1", "web", "10.0.1.1"), slice("web-2", "web", "10.0.1.2")}, "1"))
	synced := 0
	d.store.replaced = func() { synced++ }
	d.store.beginList()
	d.lists = true
	if got := mustDecode(t, d, watch.Bookmark); got != "" || synced != 0 {
		t.Errorf("the Reflector gets version %q, want none; the end of the list is reported %d times", got, synced)
	}
	if got := mustDecode(t, d, watch.Bookmark); got != "9" || synced != 1 {
		t.Errorf("the Reflector gets version %q, want 9; the end of the list is reported %d times", got, synced)
	}
	mustHave(t, sink, "EndpointSlice default/web-1")
	mustBecome(t, sink, "EndpointSlice default/web-1", "default/web [8080/TCP] [10.0.1.7]")
	lab.Must(t, d.store.Replace(nil, "9"))
	mustHave(t, sink, "EndpointSlice default/web-1")
	if got := mustDecode(t, d, watch.Bookmark); got != "10" {
		t.Errorf("the Reflector gets version %q, want 10", got)
	}
	mustBecome(t, sink, "EndpointSlice default/web-1", "default/web [8080/TCP] [10.0.1.10]")
	lab.Must(t, d.store.Replace(nil, "11"))
	mustHave(t, sink)
}

// A streamed list that is cut short deletes nothing, and its versions are not those to watch from.
func TestDirectListIsCutShort(t *testing.T) {
	d, sink := directOn(frameOf(watch.Added, "7", "10.0.1.7"))
	lab.Must(t, d.store.Replace([]any{slice("web-2", "web", "10.0.1.2")}, "1"))
	d.store.replaced = func() { t.Error("the list is reported as complete") }
	d.store.beginList()
	d.lists = true
	if got := mustDecode(t, d, watch.Bookmark); got != "" {
		t.Errorf("the Reflector gets version %q, want none", got)
	}
	if _, _, err := d.Decode(); !errors.Is(err, io.EOF) {
		t.Errorf("the end is %v", err)
	}
	mustHave(t, sink, "EndpointSlice default/web-1", "EndpointSlice default/web-2")
	d.store.replaced = func() {}
	lab.Must(t, d.store.Replace([]any{slice("web-2", "web", "10.0.1.2")}, "8"))
	mustHave(t, sink, "EndpointSlice default/web-2")
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
	lab.Must(t, err)
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
	hashed, plain := service("web-1", "10.96.0.1"), service("web-2", "10.96.0.2")
	hashed.Annotations = map[string]string{AlgorithmAnnotation: "lc"}
	var frames [][]byte
	for _, obj := range []apiObject{long, short, long, hashed, plain} {
		resourceOf(obj)
		frames = append(frames, protobufFrame(apiEvent{watch.Added, obj}))
	}
	d, sink := directOn(frames...)
	if _, _, err := d.Decode(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	mustBecome(t, sink, "EndpointSlice default/web-1", "default/web [8080/TCP] [10.0.1.7 10.0.1.8]")
	mustBecome(t, sink, "EndpointSlice default/web-2", "default/web [8080/TCP] []")
	mustBecome(t, sink, "Service default/web-1", "[10.96.0.1] [] [80/TCP] by lc")
	mustBecome(t, sink, "Service default/web-2", "[10.96.0.2] [] [80/TCP]")
}

// A watch whose connection does not flush the sink flushes it after each change, and not for the
// objects of a list, which come in large numbers.
func TestDirectFlushes(t *testing.T) {
	d, sink := directOn(frameOf(watch.Added, "7", "10.0.1.7"), frameOf(watch.Bookmark, "7", "10.0.1.7"),
		frameOf(watch.Modified, "8", "10.0.1.8"), frameOf(watch.Modified, "9", "10.0.1.9"), frameOf(watch.Bookmark, "9", "10.0.1.9"))
	d.flushed, d.lists = false, true
	d.store.beginList()
	mustDecode(t, d, watch.Bookmark) // of the first object
	mustDecode(t, d, watch.Bookmark)
	atEnd := sink.flushes
	mustDecode(t, d, watch.Bookmark)
	if got := sink.flushes - atEnd; atEnd != 1 || got != 2 {
		t.Errorf("flushed %d times for a list and %d times for two changes, want once and twice", atEnd, got)
	}
}
