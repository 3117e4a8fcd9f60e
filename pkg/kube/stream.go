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
	"slices"
	"syscall"
	"time"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"
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
}

// NewStream returns a client of the API server that cfg names. It uses HTTP/1.1, because
// with HTTP/2 another goroutine reads the connection for all requests and passes on each
// part of an answer, which costs time.
func NewStream(cfg *rest.Config) (*Stream, error) {
	s := &Stream{drained: func() {}}
	own := rest.CopyConfig(cfg)
	own.NextProtos = []string{"http/1.1"}
	// client-go's values. With HTTP/2 it would send a ping after 30 s of silence and wait 15 s.
	dialer := net.Dialer{
		Timeout:         30 * time.Second,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3},
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

// directWatch returns a watch of EndpointSlices that does not pass each event to the
// goroutine of the Reflector: the goroutine that reads the connection puts it into the store
// itself, and flushes the sink when there is nothing more to read. The Reflector still decides
// everything else: when to list and to watch, from which version, and how to treat errors.
func directWatch(stream *Stream, into *store) cache.WatchFuncWithContext {
	return func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		options.Watch = true
		request := stream.client.Get().Resource("endpointslices").VersionedParams(&options, scheme.ParameterCodec)
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
		d := &direct{source: &decoder{body: body}, store: into, ended: ctx.Done()}
		if ptr.Deref(options.SendInitialEvents, false) {
			d.listed = into.awaitReplace()
		}
		reporter := apierrors.NewClientErrorReporter(http.StatusInternalServerError, "watch", "ClientWatchDecoding")

		return watch.NewStreamWatcher(d, reporter), nil
	}
}

// direct is the decoder of a watch. Decode returns only the events that the Reflector needs:
// the objects of a streamed list, bookmarks and errors. All other events go to the store.
type direct struct {
	source *decoder
	store  *store
	ended  <-chan struct{} // closed when the context of the watch ends
	// listed is closed when the store has the list that the stream begins with. It is nil
	// if the stream does not begin with a list, or the store has it.
	listed     <-chan struct{}
	listPassed bool // Decode has returned the whole list
	// version is that of the last object that went to the store, empty if Decode has returned
	// it since. The Reflector must know it before it asks the server again.
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
	if d.listPassed && d.listed != nil {
		select {
		case <-d.listed:
			d.listed = nil
		case <-d.ended:
			return "", nil, io.EOF
		}
	}
	for {
		kind, obj, err := d.source.decode()
		slice, _ := obj.(*discoveryv1.EndpointSlice)
		switch {
		case err != nil || kind == watch.Error:
			d.store.tracker.sink.Flush()
			if d.version == "" {
				return kind, obj, err
			}
			d.held = &event{kind, obj, err}
			kind, err = watch.Bookmark, nil
			obj = &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{ResourceVersion: d.version}}
			d.version = ""

			return kind, obj, err
		case slice == nil || d.listed != nil && kind != watch.Bookmark:
			return kind, obj, nil
		case kind == watch.Bookmark:
			d.version = ""
			d.listPassed = d.listPassed || slice.Annotations[metav1.InitialEventsAnnotationKey] == "true"

			return kind, obj, nil
		}
		d.store.put(kind, slice)
		d.version = slice.ResourceVersion
	}
}

// Close implements [watch.Decoder].
func (d *direct) Close() { _ = d.source.body.Close() } // an error changes no event

// decoder decodes the events of a watch of EndpointSlices: protobuf or JSON, as the server
// chooses from the content types that the client accepts.
type decoder struct {
	body io.ReadCloser
	from *bufio.Reader      // reads body; nil before the first event
	json *restwatch.Decoder // nil: the events are protobuf
	// other decodes objects that are no slices: the Status with which a server reports an error.
	other runtime.Decoder

	// These are reused for each event, to avoid garbage.
	size   [4]byte
	frame  []byte
	event  metav1.WatchEvent
	object runtime.Unknown
}

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
	if d.object.Kind != "EndpointSlice" || d.object.APIVersion != discoveryv1.SchemeGroupVersion.String() {
		obj, err := runtime.Decode(d.other, d.event.Object.Raw)

		return kind, obj, err
	}
	slice := &discoveryv1.EndpointSlice{}

	return kind, slice, unmarshalSlice(slice, d.object.Raw)
}

// unmarshalSlice decodes an EndpointSlice but for the fields that neither this package nor the
// Reflector reads: they are most of an object, and making them of the message most of the garbage.
func unmarshalSlice(slice *discoveryv1.EndpointSlice, message []byte) error {
	endpoints := 0
	if err := eachField(message, func(number protowire.Number, _, _ []byte) error {
		if number == 2 {
			endpoints++
		}

		return nil
	}); err != nil {
		return err
	}
	slice.Endpoints = make([]discoveryv1.Endpoint, 0, endpoints)

	return eachField(message, func(number protowire.Number, field, value []byte) error {
		switch number {
		case 1:
			return eachField(value, func(number protowire.Number, field, _ []byte) error {
				switch number {
				case 1, 3, 6, 11, 12: // name, namespace, resourceVersion, labels, annotations
					return slice.ObjectMeta.Unmarshal(field)
				}

				return nil
			})
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
