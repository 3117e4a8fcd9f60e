package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"syscall"
	"time"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	restwatch "k8s.io/client-go/rest/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// Stream is a client of an API server that uses one connection per concurrent request.
// Only one [Watcher] may use it.
type Stream struct {
	client rest.Interface
	// drained is called when there is nothing more to read on a connection. [NewWatcher]
	// sets it.
	drained func()
	// dialed is called before a connection to the API server begins. NewWatcher sets it.
	dialed func(netip.AddrPort)
}

// NewStream returns a client of the API server that cfg names. It uses HTTP/1.1, because
// with HTTP/2 another goroutine reads the connection for all requests and passes on each
// part of an answer, which costs time.
func NewStream(cfg *rest.Config) (*Stream, error) {
	s := &Stream{drained: func() {}, dialed: func(netip.AddrPort) {}}
	own := rest.CopyConfig(cfg)
	own.NextProtos = []string{"http/1.1"}
	// client-go's values. With HTTP/2 it would send a ping after 30 s of silence and wait 15 s.
	dialer := net.Dialer{
		Timeout:         30 * time.Second,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3},
		Control: func(_, address string, _ syscall.RawConn) error {
			if at, err := netip.ParseAddrPort(address); err == nil { // as that of a TCP connection is
				s.dialed(netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port()))
			}

			return nil
		},
	}
	own.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		tcp := c.(*net.TCPConn) // as the network of an HTTP transport is
		raw, err := tcp.SyscallConn()

		return &conn{TCPConn: tcp, raw: raw, stream: s}, err
	}
	client, err := discoveryclient.NewForConfig(own)
	if err != nil {
		return nil, err
	}
	s.client = client.RESTClient()

	return s, nil
}

// conn is a connection whose reads do not announce a system call to Go's scheduler: the
// socket does not block, and the announcement wakes the thread that monitors system calls,
// which costs as much as the read itself.
type conn struct {
	*net.TCPConn
	raw    syscall.RawConn
	stream *Stream
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	var failed syscall.Errno
	err = c.raw.Read(func(fd uintptr) bool {
		for {
			got, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
			switch errno {
			case syscall.EINTR:
				continue
			case syscall.EAGAIN:
				c.stream.drained()

				return false // wait until there is something to read
			}
			n, failed = int(got), errno

			return true
		}
	})
	switch {
	case err != nil:
		return 0, err
	case failed != 0:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: failed}
	case n == 0:
		return 0, io.EOF
	}

	return n, nil
}

// directWatch returns a watch of a resource that does not pass each object to the goroutine of
// the Reflector: the goroutine that reads the answer puts it into the store itself, those of a
// streamed list included. The Reflector still decides everything else: when to list and to
// watch, from which version, and how to treat errors.
func directWatch(r *resource, into *store) cache.WatchFuncWithContext {
	return func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		options.Watch = true
		request := r.direct.Get().Resource(r.name).VersionedParams(&options, scheme.ParameterCodec)
		if options.TimeoutSeconds != nil {
			request.Timeout(time.Duration(*options.TimeoutSeconds) * time.Second)
		}
		body, err := request.Stream(ctx)
		switch {
		case err == nil:
		case utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err): // try again, as Request.Watch does
			return watch.NewEmptyWatch(), nil
		default:
			return nil, err
		}
		d := &direct{
			source: &decoder{body: body}, store: into, example: r.example, flushed: r.flushed,
			lists: ptr.Deref(options.SendInitialEvents, false),
		}
		if d.lists {
			into.beginList()
		}
		reporter := apierrors.NewClientErrorReporter(http.StatusInternalServerError, "watch", "ClientWatchDecoding")

		return watch.NewStreamWatcher(d, reporter), nil
	}
}

// direct is the decoder of a watch. Decode returns only the events that the Reflector needs:
// bookmarks and errors. All other events go to the store.
type direct struct {
	source  *decoder
	store   *store
	example runtime.Object // of the resource
	flushed bool           // see resource
	lists   bool           // the stream begins with a list, which has not ended yet
	shown   bool           // Decode has returned something of the list
	// version is that of the last object that went to the store, empty if Decode has returned
	// it since, or the object is one of a list. The Reflector must know it before it asks the
	// server again.
	version string
	held    *event // returned after the bookmark with the version
}

// event is one result of Decode.
type event struct {
	kind watch.EventType
	obj  runtime.Object
	err  error
}

// Decode implements [watch.Decoder].
func (d *direct) Decode() (watch.EventType, runtime.Object, error) {
	if e := d.held; e != nil {
		d.held = nil

		return e.kind, e.obj, e.err
	}
	for {
		kind, obj, err := d.source.decode()
		object, isObject := obj.(metav1.Object)
		switch {
		case err != nil || kind == watch.Error:
			d.store.tracker.sink.Flush()
			if d.version == "" {
				return kind, obj, err
			}
			d.held = &event{kind, obj, err}
			last := d.example.DeepCopyObject()
			last.(metav1.Object).SetResourceVersion(d.version)
			d.version = ""

			return watch.Bookmark, last, nil
		case !isObject:
			return kind, obj, nil
		case kind == watch.Bookmark:
			d.version = ""
			if d.lists && object.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				d.lists = false
				d.store.endList()
			}

			return kind, obj, nil
		}
		d.store.put(kind, obj)
		if d.lists {
			// A Reflector that sees nothing of a list takes the watch for one that does not work, and
			// asks for a whole list instead.
			if !d.shown {
				d.shown = true

				return watch.Bookmark, d.example.DeepCopyObject(), nil
			}

			continue
		}
		d.version = object.GetResourceVersion()
		if !d.flushed {
			d.store.tracker.sink.Flush()
		}
	}
}

// Close implements [watch.Decoder].
func (d *direct) Close() { _ = d.source.body.Close() } // an error changes no event

// decoder decodes the events of a watch of Services or EndpointSlices: protobuf or JSON, as the server
// chooses from the content types that the client accepts.
type decoder struct {
	body io.ReadCloser
	from *bufio.Reader      // reads body; nil before the first event
	json *restwatch.Decoder // nil: the events are protobuf
	// other decodes objects of other kinds: the Status with which a server reports an error.
	other runtime.Decoder

	// These are reused for each event, to avoid garbage. A slice and a Service are valid until the
	// next event.
	size    [4]byte
	frame   []byte
	event   metav1.WatchEvent
	object  runtime.Unknown
	slice   discoveryv1.EndpointSlice
	service corev1.Service
}

// The types of the objects that decode decodes itself.
var (
	sliceType   = runtime.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	serviceType = runtime.TypeMeta{APIVersion: "v1", Kind: "Service"}
)

// maxEvent is the size of the largest event in bytes. It is client-go's limit.
const maxEvent = 16 << 20

// begin finds out whether the server sends JSON or protobuf.
func (d *decoder) begin() error {
	d.from = bufio.NewReader(d.body)
	first, err := d.from.Peek(1)
	if err != nil {
		return err
	}
	isJSON := first[0] == '{' // as the first byte of a length, it would be above the limit
	mediaType := runtime.ContentTypeProtobuf
	if isJSON {
		mediaType = runtime.ContentTypeJSON
	}
	negotiator := runtime.NewClientNegotiator(scheme.Codecs.WithoutConversion(), discoveryv1.SchemeGroupVersion)
	objects, events, framer, err := negotiator.StreamDecoder(mediaType, nil)
	if err != nil {
		return err
	}
	d.other = objects
	if isJSON {
		frames := framer.NewFrameReader(io.NopCloser(d.from))
		d.json = restwatch.NewDecoder(streaming.NewDecoder(frames, events), objects)
	}

	return nil
}

// decode returns the next event. It decodes protobuf itself: client-go's decoder for objects
// of all kinds takes twice as long, and makes half of the garbage of a change.
func (d *decoder) decode() (watch.EventType, runtime.Object, error) {
	if d.from == nil {
		if err := d.begin(); err != nil {
			return "", nil, err
		}
	}
	if d.json != nil {
		return d.json.Decode()
	}
	if err := d.readFrame(); err != nil {
		return "", nil, err
	}
	d.event = metav1.WatchEvent{Object: runtime.RawExtension{Raw: d.event.Object.Raw[:0]}}
	if err := d.event.Unmarshal(d.frame); err != nil {
		return "", nil, err
	}
	kind := watch.EventType(d.event.Type)
	encoded, _ := bytes.CutPrefix(d.event.Object.Raw, []byte("k8s\x00"))
	d.object = runtime.Unknown{Raw: d.object.Raw[:0]}
	if err := d.object.Unmarshal(encoded); err != nil {
		return "", nil, err
	}
	slice, service := &d.slice, &d.service
	if kind == watch.Bookmark { // which goes to another goroutine
		slice, service = &discoveryv1.EndpointSlice{}, &corev1.Service{}
	}
	switch d.object.TypeMeta {
	case sliceType:
		*slice = discoveryv1.EndpointSlice{
			ObjectMeta: emptied(slice.ObjectMeta), Endpoints: slice.Endpoints[:0], Ports: slice.Ports[:0],
		}

		return kind, slice, unmarshalSlice(slice, d.object.Raw)
	case serviceType:
		*service = corev1.Service{ObjectMeta: emptied(service.ObjectMeta)}

		return kind, service, unmarshalService(service, d.object.Raw)
	}
	obj, err := runtime.Decode(d.other, d.event.Object.Raw)

	return kind, obj, err
}

// emptied returns metadata without values, which has the maps of meta.
func emptied(meta metav1.ObjectMeta) metav1.ObjectMeta {
	clear(meta.Labels)
	clear(meta.Annotations)

	return metav1.ObjectMeta{Labels: meta.Labels, Annotations: meta.Annotations}
}

// The unmarshal functions decode an object but for what neither this package nor the Reflector
// reads: that is most of an object, and making it of the message most of the garbage.

func unmarshalSlice(slice *discoveryv1.EndpointSlice, message []byte) error {
	return eachField(message, func(number protowire.Number, field, value []byte) error {
		switch number {
		case 1:
			return unmarshalMeta(&slice.ObjectMeta, value)
		case 2:
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{})
			endpoint := &slice.Endpoints[len(slice.Endpoints)-1]

			return eachField(value, func(number protowire.Number, field, _ []byte) error {
				switch number {
				case 1, 2, 6, 7, 8: // addresses, conditions, nodeName, zone, hints
					return endpoint.Unmarshal(field)
				}

				return nil
			})
		}

		return slice.Unmarshal(field)
	})
}

func unmarshalService(service *corev1.Service, message []byte) error {
	return eachField(message, func(number protowire.Number, field, value []byte) error {
		switch number {
		case 1:
			return unmarshalMeta(&service.ObjectMeta, value)
		case 2:
			return eachField(value, func(number protowire.Number, field, _ []byte) error {
				if number == 2 { // selector
					return nil
				}

				return service.Spec.Unmarshal(field)
			})
		}

		return service.Unmarshal(field)
	})
}

func unmarshalMeta(meta *metav1.ObjectMeta, message []byte) error {
	return eachField(message, func(number protowire.Number, field, value []byte) error {
		switch number {
		case 11, 12: // labels, annotations
			if !isRead(value) {
				return nil
			}
			fallthrough
		case 1, 3, 6, 8: // name, namespace, resourceVersion, creationTimestamp
			return meta.Unmarshal(field)
		}

		return nil
	})
}

// isRead reports whether a label or an annotation, encoded, is one that is read.
func isRead(entry []byte) bool {
	read := false
	// An error is found again when the entry is decoded.
	err := eachField(entry, func(number protowire.Number, _, value []byte) error {
		if number == 1 {
			switch string(value) {
			case discoveryv1.LabelServiceName, corev1.EndpointsLastChangeTriggerTime, metav1.InitialEventsAnnotationKey,
				AlgorithmAnnotation, HealAnnotation, SocketKey, labelServiceProxyName:
				read = true
			}
		}

		return nil
	})

	return read || err != nil
}

// eachField calls do for each field of an encoded message, with its number, all of it, and its value.
func eachField(message []byte, do func(number protowire.Number, field, value []byte) error) error {
	for len(message) > 0 {
		number, kind, tag := protowire.ConsumeTag(message)
		if tag < 0 {
			return protowire.ParseError(tag)
		}
		size := protowire.ConsumeFieldValue(number, kind, message[tag:])
		if size < 0 {
			return protowire.ParseError(size)
		}
		size += tag
		value := message[tag:size]
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(value)
		}
		if err := do(number, message[:size], value); err != nil {
			return err
		}
		message = message[size:]
	}

	return nil
}

// readFrame reads an encoded event, which its length precedes.
func (d *decoder) readFrame() error {
	if _, err := io.ReadFull(d.from, d.size[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(d.size[:])
	if size > maxEvent {
		return fmt.Errorf("an event of %d bytes: there are at most %d", size, maxEvent)
	}
	d.frame = slices.Grow(d.frame[:0], int(size))[:size]
	_, err := io.ReadFull(d.from, d.frame)
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}

	return err
}
