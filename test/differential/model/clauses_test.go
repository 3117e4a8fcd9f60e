package model

// clause is a statement of CONTRACT.md or docs/decisions that the model
// applied. They are counted: a test that never applies one of them shows nothing
// about it.
type clause int

const (
	optedOut clause = iota
	noClusterIP
	externalName
	familyOfClusterIP
	familyListed
	familyMissing
	badAddress
	hostnameIngress
	proxyIngress
	externalIPsOff
	portTwice
	nodePortTwice
	claimedTwice
	claimedByOlder
	claimedFirst
	policyNotApplicable
	policyByExternalIP

	sliceHeadless
	sliceWithoutService
	sliceOfNames
	slicePortNameless
	slicePortZero
	sliceProtocolDiffers
	endpointWithoutAddress
	endpointBadAddress
	endpointTwiceRunning
	endpointTwiceTerminating

	neverUsed
	clusterFallback
	localFallback
	independentFallbacks
	sameNode
	sameZone
	hintsIncomplete
	hintsForOthers

	rangesOpenByZero
	rangesOpenByFamily
	rangesForbid
	rangesAllow
	rangesAllowVIP
	rangesForbidVIP

	exactBeatsNodePort
	nodePortAnswers
	nodePortElsewhere
	rejectUnusedPort
	rejectICMP
	dropUnallocated
	inputPath
	untouchedByAll
	internalLocal
	internalReject
	internalDrop
	externalReject
	externalCluster
	localOfPod
	localOfNode
	localOfOthers
	localDrop
	noDetector
	masqueradeClusterIP
	masqueradeAllFlag
	hairpin
	deliveredLocally
	affinityDefault
	affinityGiven
	algorithmGiven
	algorithmBad
	healthNone
	healthSome

	differsLoopback
	differsPodSocket
	differsPodElsewhere
	differsNodeAtDevice
	differsInputAtSocket
	differsSocketSource
	differsClientHere
	differsBackendHere
	differsReplyMisses
	differsOtherProxy
	differsSingleAddress
	differsSpecialAddress
	differsServiceAsSource

	clauseCount
)

// clauseText is where each is written, and its summary.
var clauseText = [clauseCount]string{
	optedOut:            "1.1.1 a Service with the label service-proxy-name is another proxy's",
	noClusterIP:         "1.1.3 a Service without ClusterIP is skipped",
	externalName:        "1.1.3 type ExternalName is skipped even with a ClusterIP",
	familyOfClusterIP:   "1.1.4 without ipFamilies, that of clusterIP counts",
	familyListed:        "1.1.4 clusterIPs[i] is of ipFamilies[i]",
	familyMissing:       "1.1.4 a family that is missing does not exist",
	badAddress:          "1.1.5, 1.15 what is no address is skipped",
	hostnameIngress:     "1.1.7 an ingress without IP is ignored",
	proxyIngress:        "1.1.7 ipMode other than VIP is ignored",
	externalIPsOff:      "1.1.6 without AllowServiceExternalIPs no client can dial external IPs",
	portTwice:           "decision: of two ports of a Service with one number, the first has it",
	nodePortTwice:       "decision: of two Services with one nodePort, the first has it, then the older",
	claimedTwice:        "decision: ClusterIP beats load balancer beats external IP",
	claimedByOlder:      "decision: then, at a start, the older Service",
	claimedFirst:        "decision: but the one that has claimed it first",
	policyNotApplicable: "1.1.9 externalTrafficPolicy of a ClusterIP Service is Cluster",
	policyByExternalIP:  "1.1.9 but not if it has external IPs",

	sliceHeadless:            "1.1.2 a slice labelled headless is not seen",
	sliceWithoutService:      "1.2.2 a slice without service label is ignored",
	sliceOfNames:             "1.2.1 a slice of FQDNs is ignored",
	slicePortNameless:        "1.2.3 a port without name is ignored",
	slicePortZero:            "1.2.3 a port without number is ignored",
	sliceProtocolDiffers:     "1.1.12 the same port name with another protocol is another port",
	endpointWithoutAddress:   "1.2.4 an endpoint without address is ignored",
	endpointBadAddress:       "1.15 an endpoint whose address is none is skipped",
	endpointTwiceRunning:     "1.2.7 of duplicates, a later running one counts",
	endpointTwiceTerminating: "1.2.7 a terminating one replaces none",

	neverUsed:            "1.3.4 neither ready nor serving-and-terminating is never used",
	clusterFallback:      "1.3.1 no ready endpoint: those that serve and terminate",
	localFallback:        "1.3.2 no ready endpoint here: those here that serve and terminate",
	independentFallbacks: "1.3.3 terminating ones here while others are ready elsewhere",
	sameNode:             "1.4.2 (1) hints for nodes",
	sameZone:             "1.4.2 (2) hints for zones",
	hintsIncomplete:      "1.4.4 a ready endpoint lacks the hint",
	hintsForOthers:       "1.4.4 no endpoint is hinted for this node",

	rangesOpenByZero:   "1.8.4 a /0 opens the list",
	rangesOpenByFamily: "1.8.4 a list without one of the family is none",
	rangesForbid:       "A a source outside the ranges is dropped",
	rangesAllow:        "A a source inside the ranges goes on",
	rangesAllowVIP:     "A, 1.8.7 a VIP as source goes on if the node may",
	rangesForbidVIP:    "A, 1.8.7 and not if it may not",

	exactBeatsNodePort:  "B1, 1.7.9 an exact match beats the NodePort",
	nodePortAnswers:     "B2 a NodePort",
	nodePortElsewhere:   "B2 a NodePort at an address that was not selected",
	rejectUnusedPort:    "B3 an unused port of a ClusterIP",
	rejectICMP:          "B3 any protocol",
	dropUnallocated:     "B4 an unallocated address in a ServiceCIDR",
	inputPath:           "B3, B4 not on the input path",
	untouchedByAll:      "B5 untouched",
	internalLocal:       "C internalTrafficPolicy Local",
	internalReject:      "C no endpoint can serve",
	internalDrop:        "C only others can",
	externalReject:      "D no endpoint can serve",
	externalCluster:     "D externalTrafficPolicy Cluster",
	localOfPod:          "D Local: local pod traffic",
	localOfNode:         "D Local: an address of this node",
	localOfOthers:       "D Local: others, with endpoints here",
	localDrop:           "D Local: others, without",
	noDetector:          "1.5.2 no detector for the family",
	masqueradeClusterIP: "C a client that is no pod is masqueraded",
	masqueradeAllFlag:   "C masqueradeAll",
	hairpin:             "F hairpin",
	deliveredLocally:    "G nothing is done if the node itself answers",
	affinityDefault:     "1.9.2, 1.15 affinity without a timeout",
	affinityGiven:       "1.9.2 affinity with a timeout",
	algorithmGiven:      "annotation: an algorithm of the Service's own",
	algorithmBad:        "annotation: one that does not exist is as none",
	healthNone:          "1.8.12 no local ready endpoint",
	healthSome:          "1.8.12 local ready endpoints",

	differsLoopback:        "difference: NodePorts on loopback",
	differsPodSocket:       "difference: a pod's socket, whatever the detector reports",
	differsPodElsewhere:    "difference: a pod of another node is external",
	differsNodeAtDevice:    "difference: a node's address as source at a device",
	differsInputAtSocket:   "difference: an address of the node that a pod's socket dials",
	differsSocketSource:    "difference: sockets are not masqueraded",
	differsClientHere:      "difference: the client is on this node",
	differsBackendHere:     "difference: the backend is on this node",
	differsReplyMisses:     "difference: the reply would miss this node",
	differsOtherProxy:      "difference: an unallocated address is another proxy's",
	differsSingleAddress:   "difference: a ServiceCIDR of a single address",
	differsSpecialAddress:  "difference: a loopback, link-local, multicast or broadcast address is no Service's, and no endpoint's",
	differsServiceAsSource: "difference: a ClusterIP as source at a device",
}

// clauseHits counts how often each was applied.
type clauseHits [clauseCount]int

func (h *clauseHits) note(c clause) { h[c]++ }
